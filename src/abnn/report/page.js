"use strict";
// The threshold panel, and the choice of a method. Everything else is drawn already.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const SVG = "http://www.w3.org/2000/svg";

  // What is looked at: a method, a score, the number of thresholds that are passed (0: nothing is
  // kept, n: all is), and the goal that led there, if one did.
  const state = { method: data.first, score: null, kept: 0, goal: null };

  const scores = () => data.methods[state.method].scores;
  const current = () => scores()[state.score];
  const last = (array) => array[array.length - 1];

  // How many of a row are kept when the first k thresholds are passed.
  const kept = (counts, k) => (k === 0 ? 0 : counts[k - 1]);
  const flagged = (counts, k) => last(counts) - kept(counts, k);
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)}\u00a0%` : "–");
  const count = (n) => n.toLocaleString("en-US");
  const of = (part, whole) => `${count(part)} of ${count(whole)}`;

  // A threshold below all scores flags everything; the bins say how far down that is.
  function threshold(found, k) {
    if (k > 0) return found.values[k - 1];
    const low = Math.min(found.values[0], found.edges[0]);
    return low - (last(found.edges) - low || 1) / 100;
  }

  // The greatest number of thresholds whose counts fulfil a condition that fails from some on.
  function greatest(n, fulfilled) {
    let k = n;
    while (k > 0 && !fulfilled(k)) k--;
    return k;
  }

  // The threshold that reaches a goal and loses least by it.
  function reach(found, goal) {
    const n = found.values.length;
    const share = Math.min(100, Math.max(0, goal.percent));
    // A share that was computed from counts must not miss them by a rounding error.
    const enough = (part, whole) => 100 * part >= share * whole - 1e-9 * whole;
    if (goal.kind === "right") {
      const right = found.kept.right;
      let k = 0;
      while (k < n && !enough(kept(right, k), last(right))) k++;
      return k;
    }
    const counts = goal.kind === "wrong" ? found.kept.wrong : found.ood[goal.dataset]?.kept;
    return counts ? greatest(n, (k) => enough(flagged(counts, k), last(counts))) : n;
  }

  const rows = (found) => [
    { name: "Right predictions", key: "right", kept: found.kept.right, bins: found.bins.right },
    { name: "Wrong predictions", key: "wrong", kept: found.kept.wrong, bins: found.bins.wrong },
    ...data.ood
      .filter((name) => name in found.ood)
      .map((name) => ({ name, key: `ood${data.ood.indexOf(name) % 3}`, ...found.ood[name] })),
  ];

  function element(parent, tag, attributes = {}, text = null, space = SVG) {
    const made = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== null) made.textContent = text;
    parent.append(made);
    return made;
  }
  const html = (parent, tag, attributes, text) =>
    element(parent, tag, attributes, text, "http://www.w3.org/1999/xhtml");

  // The plot: a row of bars for each kind of input, with one line through all of them.
  const ROW = 76, HEAD = 24, FOOT = 44, TOP = 22;
  let toScore = () => 0;

  // The next of 1, 2, 5, 10, ... that is no smaller.
  function rounded(step) {
    const power = 10 ** Math.floor(Math.log10(step || 1));
    return power * [1, 2, 5, 10].find((digit) => digit * power >= step || digit === 10);
  }

  function plot() {
    const found = current(), box = $("plot");
    const width = Math.max(240, box.clientWidth), kinds = rows(found);
    const height = TOP + kinds.length * ROW + FOOT;
    const [low, high] = [found.edges[0], last(found.edges)];
    const x = (score) => 8 + ((score - low) / (high - low || 1)) * (width - 16);
    toScore = (pixel) => low + ((pixel - 8) / (width - 16)) * (high - low);
    const at = Math.min(width - 2, Math.max(2, x(threshold(found, state.kept))));
    box.replaceChildren();
    const svg = element(box, "svg", {
      viewBox: `0 0 ${width} ${height}`, height, role: "img",
      "aria-label": `Distributions of ${kinds.map((row) => row.name).join(", ")}; see the numbers.`,
    });
    kinds.forEach((row, i) => {
      const base = TOP + (i + 1) * ROW - 8, room = ROW - HEAD - 8;
      const most = Math.max(...row.bins, 1);
      row.bins.forEach((n, b) => {
        if (!n) return;
        const left = x(found.edges[b]), right = x(found.edges[b + 1]);
        const tall = room * Math.sqrt(n / most);
        const bar = { y: base - tall, height: tall };
        const cut = Math.min(right, Math.max(left, at));
        const gap = right - left > 4 ? 1 : 0;
        if (cut > left)
          element(svg, "rect", { class: `bar-${row.key} kept`, x: left, width: cut - left - (cut === right ? gap : 0), ...bar });
        if (right - gap > cut)
          element(svg, "rect", { class: `bar-${row.key}`, x: cut, width: right - gap - cut, ...bar });
      });
      element(svg, "line", { class: "base", x1: 8, x2: width - 8, y1: base, y2: base });
      element(svg, "text", { x: 8, y: base - room - 7 }, row.name.length > 34 ? `${row.name.slice(0, 33)}…` : row.name);
      const total = last(row.kept);
      element(svg, "text", { class: "soft", x: width - 8, y: base - room - 7, "text-anchor": "end" },
        `${percent(flagged(row.kept, state.kept), total)} flagged`);
    });
    const foot = TOP + kinds.length * ROW;
    const step = rounded((high - low) / 5);
    for (let i = Math.ceil(low / step); i * step <= high; i++)
      element(svg, "text", { class: "soft", x: x(i * step), y: foot + 12, "text-anchor": "middle" },
        Number((i * step).toPrecision(6)).toString());
    element(svg, "text", { class: "soft", x: width - 8, y: foot + 34, "text-anchor": "end" },
      `${data.scores[state.score] ?? state.score} →`);
    element(svg, "line", { class: "line", x1: at, x2: at, y1: 8, y2: foot - 4 });
    element(svg, "circle", { class: "handle", cx: at, cy: 9, r: 8 });
  }

  function drag(event) {
    const score = toScore(event.clientX - $("plot").getBoundingClientRect().left);
    move(passed(score), null);
  }
  $("plot").addEventListener("pointerdown", (event) => {
    $("plot").setPointerCapture(event.pointerId);
    drag(event);
  });
  $("plot").addEventListener("pointermove", (event) => {
    if ($("plot").hasPointerCapture(event.pointerId)) drag(event);
  });

  const passed = (score) => current().values.filter((value) => value <= score).length;

  function told() {
    const found = current(), k = state.kept, { right, wrong } = found.kept;
    const everything = last(right) + last(wrong), rest = kept(right, k) + kept(wrong, k);
    const list = $("numbers");
    list.replaceChildren();
    const say = (id, name, part, whole, more = "") => {
      const row = html(list, "div");
      html(row, "dt", {}, name);
      html(row, "dd", { id: `out-${id}` }, percent(part, whole));
      html(row, "dd", { class: "small", id: `out-${id}-count` }, of(part, whole) + more);
    };
    say("wrong", "Mistakes caught", flagged(wrong, k), last(wrong));
    say("right", "Good predictions kept", kept(right, k), last(right));
    for (const [i, name] of data.ood.entries())
      if (name in found.ood)
        say(`ood${i}`, `Rejected of ${name}`, flagged(found.ood[name].kept, k), last(found.ood[name].kept));
    say("coverage", "Kept of all predictions", rest, everything);
    say("accuracy", "Right among the kept", kept(right, k), rest, `; without a threshold ${percent(last(right), everything)}`);

    const sentence = $("sentence");
    sentence.replaceChildren();
    const parts = (template, ...values) =>
      template.forEach((text, i) => {
        sentence.append(text);
        if (i < values.length) html(sentence, "b", {}, values[i]);
      });
    if (k === 0) return void sentence.append("Below all scores, every prediction is flagged and nothing is kept.");
    const number = Number(threshold(found, k).toPrecision(3)).toString();
    const lost = flagged(right, k);
    parts`At a threshold of ${number}, ${data.methods[state.method].label} catches ${percent(flagged(wrong, k), last(wrong))} of its mistakes (${of(flagged(wrong, k), last(wrong))}) and loses ${percent(lost, last(right))} of its good predictions (${of(lost, last(right))}).`;
    sentence.append(" ");
    parts`Of the ${percent(rest, everything)} it keeps, ${percent(kept(right, k), rest)} are right, instead of ${percent(last(right), everything)}.`;
  }

  // What the same share of mistakes caught costs with every method that has this score.
  function beside() {
    const here = current().kept.wrong, body = $("beside").querySelector("tbody");
    const goal = { kind: "wrong", percent: (100 * flagged(here, state.kept)) / last(here) };
    body.replaceChildren();
    const others = data.methods.filter((method) => state.score in method.scores);
    $("beside").hidden = others.length < 2 || !last(here);
    for (const method of others) {
      const found = method.scores[state.score], { right, wrong } = found.kept;
      const k = reach(found, goal), row = html(body, "tr");
      html(row, "th", { scope: "row" }, method.label);
      html(row, "td", {}, percent(flagged(wrong, k), last(wrong)));
      html(row, "td", {}, percent(flagged(right, k), last(right)));
      const bar = html(html(row, "td"), "span", { class: "length" });
      bar.style.width = `${(100 * flagged(right, k)) / (last(right) || 1)}%`;
    }
  }

  // The point of this threshold on the curves that were drawn elsewhere on the page.
  function markers() {
    const found = current(), k = state.kept, { right, wrong } = found.kept;
    const everything = last(right) + last(wrong), rest = kept(right, k) + kept(wrong, k);
    for (const svg of all("svg[data-axes]")) {
      svg.querySelector(".marker")?.remove();
      if (state.score !== "msp") continue; // the curves are those of the confidence
      const { link } = svg.dataset, foreign = found.ood[link.slice("roc/".length)];
      if (link === "risk" && rest) mark(svg, [rest / everything, kept(wrong, k) / rest]);
      if (link.startsWith("roc/") && foreign)
        mark(svg, [(everything - rest) / everything, flagged(foreign.kept, k) / last(foreign.kept)]);
    }
  }
  function mark(svg, [u, v]) {
    const [left, right, bottom, top, x0, x1, y0, y1] = JSON.parse(svg.dataset.axes);
    const x = left + ((u - x0) / (x1 - x0)) * (right - left);
    const y = bottom + ((v - y0) / (y1 - y0)) * (top - bottom);
    const group = element(svg, "g", { class: "marker" });
    element(group, "path", { d: `M${x} ${bottom}V${y}H${left}` });
    element(group, "circle", { cx: x, cy: y, r: 4.5 });
  }

  function draw() {
    plot();
    told();
    beside();
    markers();
    const found = current(), value = threshold(found, state.kept);
    $("slider").max = found.values.length;
    $("slider").value = state.kept;
    $("slider").setAttribute("aria-valuetext", state.kept ? `threshold ${value.toPrecision(3)}` : "everything flagged");
    if (document.activeElement !== $("number")) $("number").value = Number(value.toPrecision(6));
    for (const form of all("[data-goal]"))
      form.toggleAttribute("data-chosen", form.dataset.goal === state.goal?.kind);
  }

  function move(k, goal, shared = true) {
    state.kept = k;
    state.goal = goal;
    draw();
    if (shared) remember();
  }

  // The state in the address, so that a threshold can be shared.
  function remember() {
    const fields = new URLSearchParams({
      method: data.methods[state.method].label, score: state.score, threshold: threshold(current(), state.kept),
    });
    history.replaceState(null, "", `#${fields}`);
  }
  function recall() {
    const fields = new URLSearchParams(location.hash.slice(1));
    const method = data.methods.findIndex((m) => m.label === fields.get("method"));
    const value = Number(fields.get("threshold"));
    if (method < 0 || !fields.has("threshold") || !Number.isFinite(value)) return false;
    choose(method, fields.get("score"), null, false);
    if (current()) move(passed(value), null);
    return Boolean(current());
  }

  function goalOf(form) {
    const percent = form.querySelector("input").valueAsNumber;
    return { kind: form.dataset.goal, percent: Number.isNaN(percent) ? 0 : percent, dataset: $("dataset")?.value };
  }

  const first = () => goalOf(document.querySelector("[data-goal]"));

  // Show a method everywhere; on the panel, keep the goal.
  function choose(method, score, goal = state.goal, shared = true) {
    state.method = method;
    for (const select of all("select.pick")) select.value = method;
    for (const block of all("[data-method]")) block.hidden = Number(block.dataset.method) !== method;
    const names = Object.keys(scores());
    state.score = names.includes(score) ? score : names[0];
    $("score").replaceChildren(...names.map((name) => new Option(data.scores[name] ?? name, name)));
    if (!names.length) return;
    $("score").value = state.score;
    move(reach(current(), goal ?? first()), goal, shared);
  }

  for (const select of all("select.pick"))
    select.addEventListener("change", () => choose(Number(select.value), state.score));
  $("score").addEventListener("change", () => choose(state.method, $("score").value));
  for (const form of all("[data-goal]")) {
    const find = (event) => {
      event.preventDefault();
      const goal = goalOf(form);
      if (current()) move(reach(current(), goal), goal);
    };
    form.addEventListener("submit", find);
    form.addEventListener("input", find);
  }
  $("slider").addEventListener("input", () => current() && move(Number($("slider").value), null));
  $("number").addEventListener("input", () => {
    const value = $("number").valueAsNumber;
    if (!Number.isNaN(value) && current()) move(passed(value), null);
  });
  const costs = ["cost-x", "cost-y"].map($).filter(Boolean);
  for (const select of costs)
    select.addEventListener("change", () => {
      const chosen = costs.map((each) => each.value).join("/");
      for (const block of all("[data-cost]")) block.hidden = block.dataset.cost !== chosen;
    });
  // The button says what it would change to.
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const offer = () => ($("theme").textContent = dark() ? "Light" : "Dark");
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    offer();
  });
  system.addEventListener("change", offer);
  offer();
  addEventListener("hashchange", recall);
  new ResizeObserver(() => current() && plot()).observe($("plot"));

  // Nobody has chosen yet, so the address stays as it is.
  choose(data.first, "msp", first(), false);
  recall();
})();
