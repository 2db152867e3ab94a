/* Checks an answer in Python, outside of the page's own thread, so that it can be stopped. */
let check;

async function start({ runtime, files }) {
  const { loadPyodide } = await import(`${runtime}pyodide.mjs`);
  const python = await loadPyodide({ indexURL: runtime });
  const source = await (await fetch(`${files}list_check.py`)).text();
  python.FS.writeFile("list_check.py", source);
  check = python.pyimport("list_check").check_text;
}

onmessage = async ({ data }) => {
  try {
    if (data.runtime) await start(data);
    else postMessage({ outcome: check(data.puzzle, data.source) });
    if (data.runtime) postMessage({ ready: true });
  } catch (error) {
    postMessage({ failed: String(error) });
  }
};
