/* A slider above the table of docs/hooks/fit_table.py: how many requests fit in the cache. */
(function () {
  "use strict";

  /* As requests_that_fit in docs/hooks/fit_table.py. */
  function requestsThatFit(slots, tokens, blockSize) {
    return Math.floor(Math.floor(slots / blockSize) / Math.ceil(tokens / blockSize));
  }

  function bar(words) {
    const line = document.createElement("p");
    const label = document.createElement("span");
    const fill = document.createElement("span");
    const number = document.createElement("b");
    line.className = "fit-line";
    label.textContent = words;
    fill.className = "fit-bar";
    line.append(label, fill, number);
    return { line, fill, number };
  }

  function start(root) {
    if (root.dataset.started) return;
    root.dataset.started = "yes";
    const { slots, longest, block, mean } = Object.fromEntries(
      ["slots", "longest", "block", "mean"].map((name) => [name, Number(root.dataset[name])]));
    const label = document.createElement("label");
    const slider = document.createElement("input");
    const shown = document.createElement("output");
    Object.assign(slider, { type: "range", id: "fit-tokens", min: 64, max: longest, step: 1, value: mean });
    label.htmlFor = "fit-tokens";
    label.textContent = "Tokens per request, on average: ";
    label.append(shown);
    const before = bar(`${longest.toLocaleString("en")} slots reserved`);
    const after = bar(`blocks of ${block}`);
    const lines = document.createElement("div");
    lines.setAttribute("aria-live", "polite");
    lines.append(before.line, after.line);

    function show() {
      const tokens = Number(slider.value);
      const counts = [requestsThatFit(slots, longest, 1), requestsThatFit(slots, tokens, block)];
      const full = Math.max(...counts);
      shown.textContent = tokens.toLocaleString("en");
      [before, after].forEach((each, index) => {
        each.number.textContent = `${counts[index].toLocaleString("en")} requests fit`;
        each.fill.style.setProperty("--share", counts[index] / full);
      });
    }
    slider.addEventListener("input", show);
    const controls = document.createElement("div");
    controls.className = "fit-controls";
    controls.append(label, slider, lines);
    root.prepend(controls);
    show();
  }

  function all() { document.querySelectorAll(".fit").forEach(start); }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", all);
  else all();
})();
