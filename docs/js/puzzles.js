/* The editor of the puzzles: loads Python on the first check, stops a check after 5 seconds. */
(() => {
  const SECONDS = 5;
  const editor = document.querySelector(".py-editor");
  if (!editor) return;
  const [choice, text, check, reset, result] = ["choice", "text", "check", "reset", "result"].map(
    (name) => editor.querySelector(`.py-${name}`),
  );
  const files = new URL(editor.dataset.files, location.href).href;
  const runtime = new URL(editor.dataset.runtime, location.href).href;
  const workerAddress = new URL("../js/python_worker.mjs", location.href).href;
  const kept = (name) => `pagetwin.puzzle.${name}`;
  let worker = null;

  async function read(name) {
    const reply = await fetch(files + name);
    if (!reply.ok) throw new Error(`${name}: ${reply.status}`);
    return reply.text();
  }

  async function choose() {
    result.hidden = true;
    text.value = localStorage.getItem(kept(choice.value)) ?? (await read(`${choice.value}.txt`));
    text.rows = text.value.split("\n").length + 2;
  }

  /* the next message of the worker */
  function answer(message) {
    return new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => (data.failed ? reject(new Error(data.failed)) : resolve(data));
      worker.onerror = () => reject(new Error("the worker could not be started"));
      worker.postMessage(message);
    });
  }

  function stop() {
    worker?.terminate();
    worker = null;
  }

  async function outcome() {
    if (!worker) {
      say("Loading Python ...");
      worker = new Worker(workerAddress, { type: "module" });
      await answer({ runtime, files });
    }
    say("Checking ...");
    const puzzle = await read(`${choice.value}.json`);
    let timer;
    const late = new Promise((resolve) => {
      timer = setTimeout(() => resolve(null), SECONDS * 1000);
    });
    const found = await Promise.race([answer({ puzzle, source: text.value }), late]);
    clearTimeout(timer);
    if (found) return JSON.parse(found.outcome);
    stop();
    const hint = "A right answer takes less than a second. Look for a loop that does not end.";
    return {
      status: "wrong",
      parts: [
        ["error", [`the check took more than ${SECONDS} seconds and was stopped`]],
        ["hint", [hint]],
      ],
    };
  }

  function say(words, state = "") {
    result.hidden = false;
    result.dataset.state = state;
    result.textContent = words;
  }

  function lines({ status, parts }) {
    const body = (parts ?? []).flatMap(([title, rows]) =>
      rows.map((row, number) => `${(number ? "" : title).padEnd(7)}${row}`),
    );
    return [status, ...body].join("\n");
  }

  check.addEventListener("click", async () => {
    check.disabled = true;
    try {
      const found = await outcome();
      say(lines(found), found.status.replace(" ", "-"));
    } catch (error) {
      stop();
      say(`Python could not be loaded: ${error.message}. The puzzles in the terminal need no browser.`);
    }
    check.disabled = false;
  });
  const show = () => choose().catch((error) => say(String(error)));
  choice.addEventListener("change", show);
  reset.addEventListener("click", () => {
    localStorage.removeItem(kept(choice.value));
    show();
  });
  text.addEventListener("input", () => localStorage.setItem(kept(choice.value), text.value));
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Tab" || event.shiftKey || event.ctrlKey) return;
    /* Escape, then Tab leaves the field */
    if (text.dataset.leaves) return;
    event.preventDefault();
    text.setRangeText("    ", text.selectionStart, text.selectionEnd, "end");
    text.dispatchEvent(new Event("input"));
  });
  text.addEventListener("keyup", (event) => {
    if (event.key === "Escape") text.dataset.leaves = "yes";
    else if (event.key !== "Tab") delete text.dataset.leaves;
  });
  editor.hidden = false;
  show();
})();
