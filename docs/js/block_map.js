/* Plays the recordings of docs/hooks/block_map.py. Every decision comes from the recording:
   this file only draws it. */
(function () {
  "use strict";
  const DEFAULTS = { size: "16", caching: "1", step: 0, request: "", block: "" };

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  function readState() {
    const given = new URLSearchParams(location.hash.slice(1));
    const state = { ...DEFAULTS };
    for (const name of Object.keys(state)) if (given.has(name)) state[name] = given.get(name);
    if (!only && !(recordingName(state) in window.blockMapData)) Object.assign(state, DEFAULTS);
    state.step = Math.max(0, parseInt(state.step, 10) || 0);
    return state;
  }

  /* the one recording of the page, if it has no choice */
  let only = null;

  function recordingName(state) { return only ?? `${state.size}-${state.caching}`; }

  function rangesText(ranges) {
    return ranges.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(", ");
  }

  class BlockMap {
    constructor(root) {
      this.root = root;
      only = root.dataset.recording ?? null;
      this.state = readState();
      this.timer = null;
      this.build();
      this.show();
      window.addEventListener("hashchange", () => { this.state = readState(); this.show(); });
      document.addEventListener("keydown", (event) => this.onKey(event));
    }

    /* No two requests of one step have the same colour; the name is always shown as well. */
    colourOf(id) { return `owner-${this.recording.colours[id]}`; }

    get recording() { return window.blockMapData[recordingName(this.state)]; }

    build() {
      const select = (name, label, options) => {
        const box = element("select", { id: `bm-${name}`, onchange: () => this.set({ [name]: box.value, block: "" }) });
        for (const [value, words] of options) box.append(element("option", { value }, words));
        this[name] = box;
        return element("label", { for: `bm-${name}` }, label, box);
      };
      this.play = element("button", { type: "button", class: "bm-main", onclick: () => this.toggle() }, "Play");
      this.slider = element("input", {
        type: "range", min: 0, "aria-label": "step",
        oninput: () => { this.stop(); this.set({ step: +this.slider.value }); },
      });
      this.status = element("p", { class: "bm-status", "aria-live": "polite" });
      this.events = element("ul", { class: "bm-events" });
      this.waiting = element("p", { class: "bm-waiting" });
      this.requests = element("div", { class: "bm-requests" });
      this.grid = element("div", { class: "bm-grid", role: "group", "aria-label": "blocks of the cache" });
      this.detail = element("div", { class: "bm-detail", "aria-live": "polite" });
      this.root.append(
        element("div", { class: "bm-controls" },
          this.play,
          element("button", { type: "button", "aria-label": "one step back", onclick: () => this.move(-1) }, "\u2039"),
          element("button", { type: "button", "aria-label": "one step forward", onclick: () => this.move(1) }, "\u203a"),
          this.slider,
          ...(only ? [] : [
            select("size", "block size ", [["16", "16"], ["4", "4"], ["1", "1"]]),
            select("caching", "prefix caching ", [["1", "on"], ["0", "off"]]),
          ])),
        this.status, this.events,
        element("div", { class: "bm-columns" },
          element("div", {}, element("h2", {}, "Running"), this.requests, element("h2", {}, "Waiting"), this.waiting),
          element("div", {}, element("h2", {}, "KV cache"), this.grid, this.legend(), this.detail)));
    }

    legend() {
      const entry = (kind, words) => element("span", {}, element("i", { class: `bm-key ${kind}` }), words);
      return element("p", { class: "bm-legend" },
        entry("owner-0", "one request"), entry("owner-0 shared", "shared"),
        entry("owner-0 written", "written in this step"), entry("cached", "cached, not held"), entry("", "free"));
    }

    set(changes) {
      Object.assign(this.state, changes);
      const steps = this.recording.steps.length;
      this.state.step = Math.min(Math.max(0, this.state.step), steps - 1);
      const kept = new URLSearchParams();
      for (const [name, value] of Object.entries(this.state)) if (`${value}` !== `${DEFAULTS[name]}`) kept.set(name, value);
      history.replaceState(null, "", `#${kept}`);
      this.show();
    }

    move(by) { this.stop(); this.set({ step: this.state.step + by }); }

    toggle() {
      if (this.timer) { this.stop(); return; }
      if (this.state.step >= this.recording.steps.length - 1) this.set({ step: 0 });
      this.play.textContent = "Pause";
      this.timer = setInterval(() => {
        if (this.state.step >= this.recording.steps.length - 1) this.stop();
        else this.set({ step: this.state.step + 1 });
      }, 500);
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
      this.play.textContent = "Play";
    }

    onKey(event) {
      if (!document.body.contains(this.root) || event.ctrlKey || event.metaKey || event.altKey) return;
      const inField = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      const onButton = event.target.tagName === "BUTTON" || event.target.tagName === "SUMMARY";
      if (event.key === " " && !inField && !onButton) { event.preventDefault(); this.toggle(); }
      if (inField) return;
      if (event.key === "ArrowLeft") { event.preventDefault(); this.move(-1); }
      if (event.key === "ArrowRight") { event.preventDefault(); this.move(1); }
    }

    show() {
      const { steps, numBlocks, blockSize } = this.recording;
      this.state.step = Math.min(this.state.step, steps.length - 1);
      const step = steps[this.state.step];
      if (!only) {
        this.size.value = this.state.size;
        this.caching.value = this.state.caching;
      }
      this.slider.max = steps.length - 1;
      this.slider.value = this.state.step;
      const tokens = step.running.reduce((sum, each) => sum + each.new, 0);
      const used = [...step.blocks].filter((each) => each !== "." && each !== "c").length;
      this.status.textContent =
        `Step ${this.state.step} of ${steps.length - 1}: ${tokens} new tokens, ${step.running.length} running and ` +
        `${step.waiting.length} waiting requests, ${used} of ${numBlocks} blocks held.`;
      this.showEvents(step);
      this.showRequests(step);
      this.showGrid(step, blockSize);
      this.showDetail(step, blockSize);
    }

    showEvents(step) {
      const lines = [
        ...step.running.filter((each) => each.hit).map((each) => `Request ${each.id} found ${each.hit} tokens in the cache.`),
        ...step.preempted.map((id) => `Request ${id} was preempted: no block was free.`),
        ...step.copies.map(([from, to]) => `Copy on write: block ${from} was copied to block ${to}.`),
        ...step.finished.map((id) => `Request ${id} is finished after this step.`),
      ];
      this.events.replaceChildren(...lines.map((line) => element("li", {}, line)));
    }

    showRequests(step) {
      const focused = document.activeElement && document.activeElement.dataset.request;
      this.requests.replaceChildren(...step.running.map((each) => {
        const kind = !each.new ? "no tokens in this step" : each.computed >= each.prompt ? "decode" : `prefill, ${each.new} tokens`;
        const chosen = this.state.request === each.id;
        return element("button", {
          type: "button", class: `bm-request ${this.colourOf(each.id)}`, "aria-pressed": chosen, "data-request": each.id,
          onclick: () => this.set({ request: chosen ? "" : each.id, block: "" }),
        }, element("b", {}, `request ${each.id}`), ` ${each.computed + each.new} tokens, ${kind}`);
      }));
      if (focused) { const again = this.requests.querySelector(`[data-request="${focused}"]`); if (again) again.focus(); }
      this.waiting.textContent = step.waiting.length ? step.waiting.map((id) => `request ${id}`).join(", ") : "none";
    }

    showGrid(step, blockSize) {
      const holders = new Map();
      const written = new Set();
      for (const request of step.running) {
        for (const block of request.row) holders.set(block, [...(holders.get(block) || []), request.id]);
        // which blocks the recorded slots are in
        for (const [first, last] of request.slots)
          for (let slot = first; slot <= last; slot += 1) written.add(Math.floor(slot / blockSize));
      }
      this.holders = holders;
      if (this.grid.childElementCount !== step.blocks.length) {
        this.grid.replaceChildren(...[...step.blocks].map((_, block) => element("button", {
          type: "button", onclick: () => this.set({ block: this.state.block === `${block}` ? "" : `${block}`, request: "" }),
        })));
      }
      this.grid.style.setProperty("--columns", blockSize === 16 ? 8 : blockSize === 4 ? 16 : 32);
      [...this.grid.children].forEach((cell, block) => {
        const held = holders.get(block) || [];
        const state = step.blocks[block];
        const kinds = ["bm-block"];
        if (held.length) kinds.push(this.colourOf(held[0]));
        if (held.length > 1) kinds.push("shared");
        if (!held.length && state === "c") kinds.push("cached");
        if (written.has(block)) kinds.push("written");
        if (this.state.request && held.includes(this.state.request)) kinds.push("chosen");
        if (this.state.block === `${block}`) kinds.push("chosen");
        cell.className = kinds.join(" ");
        const words = held.length ? `held by request ${held.join(", ")}` : state === "c" ? "cached" : "free";
        cell.setAttribute("aria-label", `block ${block}: ${words}`);
        cell.title = `block ${block}: ${words}`;
        cell.textContent = blockSize === 1 ? "" : held.length ? held[0] + (held.length > 1 ? "+" : "") : "";
      });
    }

    showDetail(step, blockSize) {
      const lines = [];
      if (this.state.block !== "") {
        const block = +this.state.block;
        const held = this.holders.get(block) || [];
        lines.push(element("h2", {}, `Block ${block}`));
        lines.push(element("p", {}, `Slots ${block * blockSize} to ${(block + 1) * blockSize - 1}. ` + (
          held.length ? `Reference count ${step.blocks[block]}.`
            : step.blocks[block] === "c" ? "Its content is known, and no request holds it." : "Free.")));
        for (const request of step.running.filter((each) => each.row.includes(block))) {
          const entry = request.row.indexOf(block);
          lines.push(element("p", {},
            `Entry ${entry} of request ${request.id}'s row: positions ${entry * blockSize} to ${(entry + 1) * blockSize - 1}.`));
        }
      } else if (this.state.request !== "") {
        const request = step.running.find((each) => each.id === this.state.request);
        lines.push(element("h2", {}, `Request ${this.state.request}`));
        if (!request) lines.push(element("p", {}, "It is not running in this step."));
        else lines.push(
          element("p", {}, `Prompt ${request.prompt} tokens. In the cache before this step: ${request.computed}; new: ${request.new}.`),
          element("p", {}, "Block-table row: ", element("code", {}, `[${request.row.join(", ")}]`)),
          element("p", {}, "slot_mapping of this step: ", element("code", {}, request.new ? rangesText(request.slots) : "empty")));
      }
      this.detail.replaceChildren(...lines);
    }
  }

  function start() {
    const root = document.getElementById("block-map");
    if (root && window.blockMapData && !root.dataset.started) {
      root.dataset.started = "yes";
      window.blockMap = new BlockMap(root);
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
