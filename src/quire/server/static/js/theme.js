// Runs before the first paint, so that the page never flashes in the wrong colours.
"use strict";
(function () {
  let chosen = null;
  try {
    chosen = localStorage.getItem("quire.theme");
  } catch {
    // storage is off: follow the system
  }
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
