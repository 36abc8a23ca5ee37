"use strict";
// Shared by report and viewer: data blocks, small DOM helpers, dark and light. Text enters the page by textContent only.
const agentrl = {};

agentrl.data = (name) => {
  const block = document.getElementById(name);
  return block ? JSON.parse(block.textContent) : null;
};

// An element with classes, text and children; `attributes` are set one by one.
agentrl.el = (tag, classes, content, attributes) => {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  for (const [key, value] of Object.entries(attributes || {})) node.setAttribute(key, value);
  for (const child of Array.isArray(content) ? content : [content]) {
    if (child !== undefined && child !== null) node.append(child);
  }
  return node;
};

agentrl.percent = (value, digits) => (value === null ? "–" : (100 * value).toFixed(digits) + " %");
agentrl.count = (value) => value.toLocaleString("en-US");

// `data-theme` on the root overrides the system's choice; "themechange" tells the plots to fetch their colours anew.
agentrl.dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = agentrl.dark() ? "light" : "dark";
  document.dispatchEvent(new Event("themechange"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new Event("themechange")));
