/* Regions that scroll can be reached with the keyboard. */
document.addEventListener("DOMContentLoaded", () => {
  for (const each of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code"))
    each.tabIndex = 0;
});
