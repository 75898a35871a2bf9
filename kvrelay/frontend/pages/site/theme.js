// Light, dark, or as the system has it.

import { byId } from "./dom.js";

const NAME = "kvrelay-theme";
const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function startTheme() {
  const button = byId("theme");
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  let theme = NEXT[localStorage.getItem(NAME)] ? localStorage.getItem(NAME) : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(NAME, theme);
    show(theme);
  });
}
