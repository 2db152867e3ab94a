document.addEventListener("DOMContentLoaded", () => {
  /* Regions that scroll can be reached with the keyboard. */
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
    region.tabIndex = 0;
  /* In a table, code may break after a slash or a space, and nowhere else. */
  for (const code of document.querySelectorAll(".md-typeset td code")) {
    const parts = code.textContent.match(/[^/ ]*[/ ]*/g).filter((part) => part);
    if (parts.length < 2 || code.childElementCount) continue;
    code.classList.add("parts");
    code.replaceChildren(...parts.flatMap((part) => {
      const span = document.createElement("span");
      span.textContent = part;
      return [span, document.createElement("wbr")];
    }));
  }
});
