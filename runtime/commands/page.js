// The page is complete without this: it shows one view at a time, links the panes, and takes keys.
"use strict";
const views = [...document.querySelectorAll("main > section")];
const steps = [...document.querySelectorAll("#passes article")];

function show(items, chosen, links) {
  for (const item of items) item.classList.toggle("hidden", item !== chosen);
  for (const link of links) {
    if (link.hash === "#" + chosen.id) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

function go(hash) {
  const target = hash && document.getElementById(hash.slice(1));
  const view = (target && target.closest("main > section")) || views[0];
  show(views, view, document.querySelectorAll("#views a"));
  if (steps.length) {
    const step = target && target.closest("#passes article");
    if (step || steps.every((s) => !s.classList.contains("hidden")))
      show(steps, step || steps[0], document.querySelectorAll("#steps a"));
  }
  if (view.classList.contains("kernel")) open(view);
  if (target && target.matches(".line, .op")) choose(view, target);
  // A browser goes to what the address names; panes scroll by themselves, and the views stay in sight.
  requestAnimationFrame(() => window.scrollTo(0, 0));
  setTimeout(() => window.scrollTo(0, 0), 60);
}

// PTX and SASS come as text and a table of the CUDA line of each line; they become elements when first looked at.
function open(view) {
  for (const pane of view.querySelectorAll("pre[data-source]")) {
    const lines = pane.textContent.replace(/^\n/, "").split("\n");
    const places = [];
    for (const run of pane.dataset.source.split(" ")) {
      const [line, times] = run.split("x");
      for (let n = 0; n < Number(times || 1); ++n) places.push(Number(line));
    }
    pane.textContent = "";
    delete pane.dataset.source;
    const fragment = document.createDocumentFragment();
    lines.forEach((text, n) => {
      const line = document.createElement("span");
      line.className = "line";
      line.textContent = text;
      line.dataset.line = places[n] || 0;
      const from = places[n] && document.getElementById(view.dataset.kernel + "-L" + places[n]);
      line.dataset.op = from ? from.dataset.op : "-1";
      line.style.setProperty("--hue", hue(line.dataset.op));
      fragment.append(line);
    });
    pane.append(fragment);
  }
}

function hue(op) { return (Number(op) * 67 + 200) % 360; }

// An op chooses all of its lines; a line chooses what comes from it and what it comes from.
function choose(view, element) {
  const isOp = element.classList.contains("op");
  const op = element.dataset.op, line = element.dataset.line;
  for (const other of view.querySelectorAll(".chosen, .here")) other.classList.remove("chosen", "here");
  for (const other of view.querySelectorAll("[data-op]")) {
    const same = isOp ? other.dataset.op === op
      : other.classList.contains("op") ? other.dataset.op === op : line !== "0" && other.dataset.line === line;
    if (same) other.classList.add("chosen");
  }
  element.classList.add("chosen", "here");
  for (const pane of view.querySelectorAll(".pane > :is(ol, pre)")) {
    if (pane.contains(element)) continue;
    const first = pane.querySelector(".chosen");
    if (first) pane.scrollTop += first.getBoundingClientRect().top - pane.getBoundingClientRect().top - pane.clientHeight / 3;
  }
}

function move(pane, down) {
  const lines = [...pane.querySelectorAll("[data-op]")];
  const now = lines.findIndex((line) => line.classList.contains("here"));
  const next = lines[Math.max(0, Math.min(lines.length - 1, now < 0 ? 0 : now + down))];
  if (!next) return;
  choose(pane.closest("section"), next);
  next.scrollIntoView({ block: "nearest" });
  if (next.matches("a")) next.focus({ preventScroll: true });
}

function turn(by) {
  const view = views.find((v) => !v.classList.contains("hidden"));
  const passes = view.id === "passes" && steps.length;
  const list = passes ? steps : views;
  const now = list.findIndex((v) => !v.classList.contains("hidden"));
  location.hash = list[(now + by + list.length) % list.length].id;
}

document.addEventListener("click", (event) => {
  const element = event.target.closest(".line, .op");
  if (!element || !element.dataset.op) return;
  choose(element.closest("section"), element);
  if (element.matches("a")) event.preventDefault();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const pane = document.activeElement && document.activeElement.closest(".pane > :is(ol, pre)");
  if ((event.key === "ArrowDown" || event.key === "ArrowUp") && pane) {
    move(pane, event.key === "ArrowDown" ? 1 : -1);
    event.preventDefault();
  } else if (event.key === "[" || event.key === "]") turn(event.key === "]" ? 1 : -1);
  else if (event.key === "{" || event.key === "}") {
    const now = views.findIndex((v) => !v.classList.contains("hidden"));
    location.hash = views[(now + (event.key === "}" ? 1 : -1) + views.length) % views.length].id;
  } else if (event.key === "Escape")
    for (const other of document.querySelectorAll(".chosen, .here")) other.classList.remove("chosen", "here");
});

window.addEventListener("hashchange", () => go(location.hash));
window.addEventListener("load", () => window.scrollTo(0, 0));
go(location.hash);
