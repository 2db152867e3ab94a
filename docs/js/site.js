document.addEventListener("DOMContentLoaded", () => {
  /* Regions that scroll can be reached with the keyboard. */
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
    region.tabIndex = 0;
  /* In a table, a path may break after a slash, and nowhere else. */
  for (const code of document.querySelectorAll(".md-typeset td code")) {
    const parts = code.textContent.split("/");
    if (parts.length < 2 || code.childElementCount) continue;
    code.replaceChildren(...parts.flatMap((part, index) =>
      index < parts.length - 1 ? [`${part}/`, document.createElement("wbr")] : [part]));
  }
});
