"use strict";
// An entry: t time in ns since the start, u time of the arrival, a lane, b other lane, k kind,
// l label, e why it failed, s severity (1 warning, 2 error), x lost, r repeated, in: received,
// its sending was not captured, f fields.
(() => {
  const about = JSON.parse(document.getElementById("about").textContent);
  const entries = JSON.parse(document.getElementById("entries").textContent);
  const byId = (id) => document.getElementById(id);
  const svg = byId("diagram");
  const details = byId("details");

  const GUTTER = 92;
  const ROW = 23;
  const ARRIVAL = 9;
  const LABELS_FROM = 0.42;
  const MARKS = { post: 1, receive: 1, completion: 1, call: 1, report: 1 };
  const KINDS = [
    ["packets", "Packets", ["data", "other"]],
    ["acknowledgements", "Acknowledgements", ["ack", "nak"]],
    ["management", "Connection management", ["cm"]],
    ["posts", "Posts", ["post", "receive"]],
    ["completions", "Completions", ["completion"]],
    ["calls", "Calls", ["call"]],
    ["explanations", "Explanations", ["report"]],
  ];

  // Text of programs is set as text only.
  function element(name, options = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(options)) {
      if (key === "text") made.textContent = value;
      else if (key === "class") made.className = value;
      else made.setAttribute(key, value);
    }
    made.append(...children);
    return made;
  }

  function shape(parent, name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) made.setAttribute(key, attributes[key]);
    if (text !== undefined) made.textContent = text;
    parent.appendChild(made);
    return made;
  }

  function duration(ns) {
    const [value, unit] = ns < 1e3 ? [ns, "ns"] : ns < 1e6 ? [ns / 1e3, "µs"]
      : ns < 1e9 ? [ns / 1e6, "ms"] : [ns / 1e9, "s"];
    return `${Number(value.toPrecision(3))} ${unit}`;
  }

  function moment(ns) {
    return `${(ns / 1e6).toFixed(3)} ms`;
  }

  function short(text, most) {
    return text.length > most ? text.slice(0, most - 1) + "…" : text;
  }

  // Which lanes and kinds are shown.
  const order = [];
  const problems = new Set();
  for (const [index, entry] of entries.entries()) {
    entry.i = index;
    for (const lane of [entry.a, entry.b]) {
      if (lane === undefined) continue;
      if (!order.includes(lane)) order.push(lane);
      if (entry.s) problems.add(lane);
    }
  }
  const MOST_LANES = 10;
  const isWanted = (lane) => about.lanes[lane].queue || problems.has(lane);
  const shown = new Set(order.some(isWanted) ? order.filter(isWanted) : order);
  if (shown.size > MOST_LANES) {
    shown.clear();
    const wanted = entries.filter((entry) => entry.s).concat(entries);
    for (const entry of wanted) {
      for (const lane of [entry.a, entry.b]) {
        if (lane !== undefined && shown.size < MOST_LANES) shown.add(lane);
      }
    }
  }
  const hiddenKinds = new Set();

  const view = { x: 0, y: 0, k: 1 };
  let layout;
  let drawn = { from: 1, to: 0, labels: false };
  let kept = null;

  // Assigns a height to each time at which something begins or arrives: events in order, pauses
  // shortened.
  function arrange() {
    const lanes = order.filter((lane) => shown.has(lane));
    const position = new Map();
    const visible = entries.filter((entry) => !hiddenKinds.has(entry.k)
      && (shown.has(entry.a) || (entry.b !== undefined && shown.has(entry.b))));
    // Text beside the outermost lanes.
    const hasText = (lane) => visible.some((entry) => (MARKS[entry.k] && entry.a === lane)
      || (entry.e && !entry.x && (entry.in ? entry.a : entry.b ?? entry.a) === lane));
    const margin = (lane) => (hasText(lane) ? 330 : 80);
    const spacing = lanes.length > 4 ? 260 : 420;
    const left = GUTTER + (lanes.length > 1 ? margin(lanes[0]) : 80);
    lanes.forEach((lane, index) => position.set(lane, left + index * spacing));
    const right = lanes.length ? margin(lanes[lanes.length - 1]) : 80;
    const width = left + Math.max(0, lanes.length - 1) * spacing + right;

    const points = [];
    for (const entry of visible) {
      points.push({ time: entry.t, entry, arrives: false });
      if (entry.u !== undefined) points.push({ time: entry.u, entry, arrives: true });
    }
    points.sort((a, b) => a.time - b.time || a.arrives - b.arrives);
    const gaps = new Map(about.gaps.map(([at, count]) => [entries[at], count]));
    if (about.gaps.length && about.gaps[about.gaps.length - 1][0] === entries.length) {
      gaps.set(null, about.gaps[about.gaps.length - 1][1]);
    }
    const places = new Map();
    const rows = [];
    const breaks = [];
    const pauses = [];
    let y = 14;
    let before;
    for (const point of points) {
      const place = places.get(point.entry) ?? {};
      places.set(point.entry, place);
      const needsRow = !point.arrives || (point.entry.e && !point.entry.x);
      let step = needsRow ? ROW : ARRIVAL;
      const pause = before === undefined ? 0 : point.time - before;
      if (pause > 20e3) step += Math.min(64, 12 * Math.log10(pause / 1e4));
      if (!point.arrives && gaps.has(point.entry)) {
        breaks.push({ y: y + 12, count: gaps.get(point.entry) });
        step += 44;
      } else if (pause > 2e5) {
        step = Math.max(step, 44);
        pauses.push({ y: y + step / 2, pause });
      }
      y += step;
      if (point.arrives) {
        place.to = y;
      } else {
        place.from = y;
        rows.push({ y, time: point.time });
      }
      before = point.time;
    }
    if (gaps.has(null)) breaks.push({ y: y + 12, count: gaps.get(null) });
    layout = { lanes, position, width, height: y + 80, places, rows, breaks, pauses, visible };
    layout.bars = bars(visible, places, position);
    drawn = { from: 1, to: 0, labels: false };
  }

  // From a post to its completion.
  function bars(visible, places, position) {
    const open = new Map();
    const found = [];
    const request = (entry) => {
      const field = entry.f.find(([name]) => name === "wr_id");
      return field && `${entry.a} ${field[1]}`;
    };
    for (const entry of visible) {
      if (entry.k === "post") open.set(request(entry), entry);
      if (entry.k !== "completion" || !open.has(request(entry))) continue;
      const post = open.get(request(entry));
      open.delete(request(entry));
      if (position.has(entry.a)) {
        found.push({ x: position.get(entry.a), from: places.get(post).from, to: places.get(entry).from });
      }
    }
    return found;
  }

  function cause(entry, most) {
    return short(entry.e.replace("request of the peer refused: ", "refused: "), most);
  }

  function severity(entry) {
    return entry.s === 2 ? "error" : entry.s === 1 ? "warning" : "";
  }

  function drawTip(group, x, y, dx, dy) {
    const length = Math.hypot(dx, dy) || 1;
    const [ux, uy] = [dx / length, dy / length];
    const [bx, by] = [x - 9 * ux, y - 9 * uy];
    shape(group, "path", {
      class: "tip",
      d: `M${x} ${y}L${bx - 4 * uy} ${by + 4 * ux}L${bx + 4 * uy} ${by - 4 * ux}Z`,
    });
  }

  function drawCross(group, x, y) {
    shape(group, "path", { class: "cross", d: `M${x - 5} ${y - 5}L${x + 5} ${y + 5}M${x - 5} ${y + 5}L${x + 5} ${y - 5}` });
  }

  // Returns where text beside a lane goes: outside of the first and last one.
  function side(lane, x) {
    const first = layout.lanes[0] === lane && layout.lanes.length > 1;
    return first ? { x: x - 14, anchor: "end" } : { x: x + 14, anchor: "start" };
  }

  function drawArrow(group, texts, entry) {
    const { from, to } = layout.places.get(entry);
    const start = layout.position.get(entry.a);
    const end = entry.b === undefined ? undefined : layout.position.get(entry.b);
    let x0 = start ?? end - 70;
    let x1 = end ?? start + 70;
    let y1 = to ?? from + 12;
    const isOpen = to === undefined && !entry.x;
    if (entry.in) [x0, x1] = [start - 90, start];
    if (entry.x) [x1, y1] = [x0 + (x1 - x0) / 2, from + 12];
    group.classList.add("arrow");
    if (isOpen) group.classList.add("open");
    if (x0 === x1) {
      const path = `M${x0} ${from}C${x0 + 70} ${from} ${x0 + 70} ${y1} ${x0 + 3} ${y1}`;
      shape(group, "path", { class: "hit", d: path });
      shape(group, "path", { class: "line", d: path });
      drawTip(group, x0 + 1, y1, -1, 0);
    } else {
      const line = { x1: x0, y1: from, x2: x1, y2: y1 };
      shape(group, "line", { class: "hit", ...line });
      shape(group, "line", { class: "line", ...line });
      if (entry.x) drawCross(group, x1, y1);
      else drawTip(group, x1, y1, x1 - x0, y1 - from);
    }
    if (!texts) return;
    const rightwards = x1 >= x0;
    shape(texts, "text", {
      class: "label halo", x: x0 + (rightwards ? 10 : -10), y: from - 4,
      "text-anchor": rightwards ? "start" : "end",
    }, short(entry.l, 42));
    if (!entry.e) return;
    if (entry.x) {
      const at = { class: "cause halo", x: x1 + (rightwards ? 12 : -12), y: y1 + 5 };
      shape(texts, "text", { ...at, "text-anchor": rightwards ? "start" : "end" }, cause(entry, 34));
    } else {
      const beside = side(entry.in ? entry.a : entry.b ?? entry.a, x1);
      shape(texts, "text", { class: "cause halo", x: beside.x, y: y1 + 4, "text-anchor": beside.anchor }, cause(entry, 46));
    }
  }

  function drawMark(group, texts, entry) {
    const x = layout.position.get(entry.a);
    const y = layout.places.get(entry).from;
    group.classList.add("mark");
    shape(group, "rect", { class: "hit", x: x - 9, y: y - 9, width: 18, height: 18 });
    if (entry.k === "completion") {
      shape(group, "circle", { class: "shape", cx: x, cy: y, r: 4.5 });
    } else if (entry.k === "call") {
      shape(group, "path", { class: "shape", d: `M${x} ${y - 5}L${x + 5} ${y}L${x} ${y + 5}L${x - 5} ${y}Z` });
    } else if (entry.k === "report") {
      drawCross(group, x, y);
    } else {
      shape(group, "rect", { class: "shape", x: x - 4, y: y - 4, width: 8, height: 8 });
    }
    if (!texts) return;
    const beside = side(entry.a, x);
    const text = entry.e ? (entry.k === "report" ? entry.e : `${entry.l}: ${entry.e}`) : entry.l;
    shape(texts, "text", { class: "label halo", x: beside.x, y: y + 4, "text-anchor": beside.anchor }, short(text, 46));
  }

  // Draws what is in sight, and as much above and below.
  function draw() {
    const [width, height] = [svg.clientWidth, svg.clientHeight];
    if (!width || !height) return;
    const visible = height / view.k;
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${width / view.k} ${visible}`);
    const labels = view.k >= LABELS_FROM;
    if (view.y < drawn.from || view.y + visible > drawn.to || labels !== drawn.labels) {
      drawn = { from: view.y - visible, to: view.y + 2 * visible, labels };
      svg.replaceChildren();
      drawRange();
    }
    const gutter = svg.querySelector("#gutter");
    if (gutter) gutter.setAttribute("transform", `translate(${view.x} 0)`);
    drawHeads();
  }

  function drawRange() {
    const { from, to, labels } = drawn;
    const isIn = (y) => y >= from && y <= to;
    for (const lane of layout.lanes) {
      const x = layout.position.get(lane);
      shape(svg, "line", { class: "lane", x1: x, x2: x, y1: from, y2: to });
    }
    for (const bar of layout.bars) {
      if (bar.to < from || bar.from > to) continue;
      shape(svg, "rect", { class: "bar", x: bar.x - 4, y: bar.from, width: 8, height: Math.max(1, bar.to - bar.from), rx: 3 });
    }
    for (const gap of layout.breaks.filter((it) => isIn(it.y))) {
      shape(svg, "rect", { class: "gap", x: GUTTER + 10, y: gap.y, width: layout.width - GUTTER - 20, height: 26, rx: 5 });
      shape(svg, "text", { class: "left-out", x: (layout.width + GUTTER) / 2, y: gap.y + 17, "text-anchor": "middle" },
        `${gap.count.toLocaleString("en")} left out`);
    }
    // No line crosses a text.
    const [lines, above] = [shape(svg, "g", {}), shape(svg, "g", {})];
    for (const entry of layout.visible) {
      const place = layout.places.get(entry);
      const last = Math.max(place.from, place.to ?? 0);
      const first = Math.min(place.from, place.to ?? place.from);
      if (last < from || first > to) continue;
      const attributes = { class: `entry ${entry.k} ${severity(entry)}`, "data-entry": entry.i };
      const group = shape(lines, "g", attributes);
      const texts = labels && shape(above, "g", attributes);
      if (MARKS[entry.k]) drawMark(group, texts, entry);
      else drawArrow(group, texts, entry);
    }
    choose();
    const gutter = shape(svg, "g", { id: "gutter" });
    shape(gutter, "rect", { class: "gutter", x: 0, y: from, width: GUTTER - 6, height: to - from });
    shape(gutter, "line", { class: "edge", x1: GUTTER - 6, x2: GUTTER - 6, y1: from, y2: to });
    let free = -Infinity;
    for (const row of layout.rows) {
      if (!isIn(row.y) || row.y < free) continue;
      shape(gutter, "text", { class: "time", x: GUTTER - 14, y: row.y + 4 }, moment(row.time));
      free = row.y + 14 / Math.min(1, view.k);
    }
    for (const pause of layout.pauses.filter((it) => isIn(it.y))) {
      shape(gutter, "text", { class: "pause", x: GUTTER - 14, y: pause.y + 4 }, `⋮ ${duration(pause.pause)}`);
    }
  }

  function drawHeads() {
    const heads = byId("heads");
    heads.replaceChildren();
    const spacing = layout.lanes.length > 1
      ? layout.position.get(layout.lanes[1]) - layout.position.get(layout.lanes[0]) : 420;
    const width = Math.min(300, (spacing - 10) * view.k);
    for (const lane of layout.lanes) {
      const of = about.lanes[lane];
      const left = (layout.position.get(lane) - view.x) * view.k - width / 2;
      const head = element("div", { class: "head", style: `left:${left}px;width:${width}px` },
        element("b", { text: of.title }),
        element("span", { text: [of.owner, of.device].filter(Boolean).join(" · ") }));
      heads.append(head);
    }
  }

  function limit() {
    view.k = Math.min(4, Math.max(0.02, view.k));
    const [width, height] = [svg.clientWidth / view.k, svg.clientHeight / view.k];
    const bound = (value, low, high) => Math.max(low, Math.min(high, value));
    view.x = layout.width < width ? (layout.width - width) / 2 : bound(view.x, 0, layout.width - width);
    view.y = bound(view.y, 0, Math.max(0, layout.height - height));
  }

  let isPlanned = false;
  function redraw() {
    limit();
    if (isPlanned) return;
    isPlanned = true;
    requestAnimationFrame(() => {
      isPlanned = false;
      draw();
    });
  }

  function zoom(factor, x = svg.clientWidth / 2, y = svg.clientHeight / 2) {
    const at = { x: view.x + x / view.k, y: view.y + y / view.k };
    view.k = Math.min(4, Math.max(0.02, view.k * factor));
    view.x = at.x - x / view.k;
    view.y = at.y - y / view.k;
    redraw();
  }

  function fit() {
    // Smaller, nothing is seen of a long diagram.
    const all = Math.max(0.15, svg.clientHeight / layout.height);
    view.k = Math.min(1.2, svg.clientWidth / layout.width, all);
    view.x = view.y = 0;
    redraw();
  }

  function table(fields) {
    return element("table", {}, ...fields.map(([name, value]) =>
      element("tr", {}, element("th", { text: name }), element("td", { text: value }))));
  }

  function laneName(lane) {
    const of = about.lanes[lane];
    return [of.title, of.owner, of.device].filter(Boolean).join(", ");
  }

  function fieldsOf(entry) {
    const isArrow = !MARKS[entry.k];
    const fields = [];
    if (!isArrow) fields.push(["at", moment(entry.t)], ["of", laneName(entry.a)]);
    else {
      fields.push([entry.in ? "received" : "sent", moment(entry.t)]);
      if (entry.u !== undefined) fields.push(["arrived", `${moment(entry.u)}, ${duration(Math.max(0, entry.u - entry.t))} later`]);
      fields.push([entry.in ? "by" : "from", laneName(entry.a)]);
      if (entry.b !== undefined) fields.push(["to", laneName(entry.b)]);
    }
    return fields.concat(entry.f);
  }

  function show(entry, x, y) {
    details.replaceChildren(element("h3", { text: entry.l }));
    if (entry.e) details.append(element("div", { class: `message ${severity(entry)}`, text: entry.e }));
    details.append(table(fieldsOf(entry)));
    details.hidden = false;
    const [width, height] = [details.offsetWidth, details.offsetHeight];
    const left = x + 18 + width > innerWidth ? x - 18 - width : x + 18;
    details.style.left = `${Math.max(6, left)}px`;
    details.style.top = `${Math.max(6, Math.min(y + 12, innerHeight - height - 8))}px`;
  }

  function keep(entry, x, y) {
    kept = entry;
    details.classList.toggle("kept", entry !== null);
    choose();
    if (entry === null) details.hidden = true;
    else show(entry, x, y);
  }

  // Marks the entry whose fields are kept on the screen.
  function choose() {
    for (const group of svg.querySelectorAll(".entry")) {
      group.classList.toggle("chosen", Number(group.dataset.entry) === kept?.i);
    }
  }

  function entryAt(target) {
    const group = target.closest?.(".entry");
    return group && entries[Number(group.dataset.entry)];
  }

  let current = -1;
  function goTo(entry) {
    for (const lane of [entry.a, entry.b]) if (lane !== undefined) shown.add(lane);
    hiddenKinds.delete(entry.k);
    fillChoices();
    arrange();
    const place = layout.places.get(entry);
    view.k = Math.max(view.k, 0.8);
    view.y = (place.to ?? place.from) - svg.clientHeight / view.k / 2;
    const x = layout.position.get(entry.b ?? entry.a);
    view.x = x - svg.clientWidth / view.k / 2;
    limit();
    draw();
    const box = svg.getBoundingClientRect();
    keep(entry, box.left + (x - view.x) * view.k, box.top + ((place.to ?? place.from) - view.y) * view.k + 14);
  }

  function fillChoices() {
    const lanes = byId("lanes");
    lanes.replaceChildren();
    lanes.hidden = order.length < 2;
    for (const lane of order) {
      const button = element("button", { "aria-pressed": shown.has(lane), text: about.lanes[lane].title, title: laneName(lane) });
      if (problems.has(lane)) button.classList.add("bad");
      button.onclick = () => {
        if (!shown.delete(lane)) shown.add(lane);
        changed();
      };
      lanes.append(button);
    }
    for (const [name, all] of [["All", true], ["None", false]]) {
      const button = element("button", { text: name });
      button.onclick = () => {
        shown.clear();
        if (all) order.forEach((lane) => shown.add(lane));
        changed();
      };
      if (order.length > 3) lanes.append(button);
    }
    const kinds = byId("kinds");
    kinds.replaceChildren();
    for (const [id, name, members] of KINDS) {
      if (!entries.some((entry) => members.includes(entry.k))) continue;
      const box = element("input", { type: "checkbox", id: `kind-${id}` });
      box.checked = !members.some((kind) => hiddenKinds.has(kind));
      box.onchange = () => {
        for (const kind of members) {
          if (box.checked) hiddenKinds.delete(kind);
          else hiddenKinds.add(kind);
        }
        changed();
      };
      kinds.append(element("label", {}, box, name));
    }
  }

  function changed() {
    keep(null);
    fillChoices();
    arrange();
    redraw();
  }

  function fillProblems() {
    const panel = byId("problems");
    const MOST = 300;
    const bad = entries.filter((entry) => entry.s === 2);
    const repaired = entries.filter((entry) => entry.s === 1);
    panel.hidden = !bad.length && !repaired.length && !about.untimed.length;
    const list = (title, found) => {
      if (!found.length) return;
      panel.append(element("h2", { text: title }));
      for (const entry of found.slice(0, MOST)) {
        const button = element("button", { class: severity(entry) },
          element("small", { text: `${moment(entry.t)} · ${about.lanes[entry.a].title}` }),
          entry.e && !entry.l.startsWith("explanation") ? `${entry.l}: ${entry.e}` : entry.e ?? entry.l);
        button.onclick = () => goTo(entry);
        panel.append(button);
      }
      if (found.length > MOST) panel.append(element("small", { text: `and ${found.length - MOST} more` }));
    };
    list("Errors", bad);
    if (about.untimed.length) {
      panel.append(element("h2", { text: "Explanations" }));
      for (const it of about.untimed) {
        panel.append(element("details", {},
          element("summary", {}, element("small", { text: it.where }), it.e), table(it.f)));
      }
      const more = about.untimed_count - about.untimed.length;
      if (more > 0) panel.append(element("small", { text: `and ${more} more` }));
    }
    list("Repaired by the transport, or consequences", repaired);
  }

  function fillTotals() {
    const left = about.entries - entries.length;
    const parts = [`${about.entries.toLocaleString("en")} events`, `${about.errors} errors`, `${about.warnings} warnings`];
    if (left > 0) parts.push(`${left.toLocaleString("en")} left out`);
    if (about.most) parts.push(`only the first ${about.most.toLocaleString("en")} were read`);
    if (about.malformed_lines) parts.push(`${about.malformed_lines} malformed lines`);
    const start = new Date(Number(BigInt(about.start) / 1000000n));
    if (entries.length) parts.push(start.toISOString().replace("T", " ").replace(/\..*/, " UTC"));
    byId("totals").textContent = parts.join(" · ");
  }

  // Input.
  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 20 : 1;
    if (event.ctrlKey || event.metaKey) {
      const box = svg.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY * unit * 0.002), event.clientX - box.left, event.clientY - box.top);
      return;
    }
    const [dx, dy] = event.shiftKey && !event.deltaX ? [event.deltaY, 0] : [event.deltaX, event.deltaY];
    view.x += dx * unit / view.k;
    view.y += dy * unit / view.k;
    redraw();
  }, { passive: false });

  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button === 0) drag = { x: event.clientX, y: event.clientY, moved: false };
  });
  addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    if (!drag.moved && Math.hypot(dx, dy) < 4) return;
    svg.classList.add("moving");
    view.x -= dx / view.k;
    view.y -= dy / view.k;
    drag = { x: event.clientX, y: event.clientY, moved: true };
    redraw();
  });
  addEventListener("pointerup", (event) => {
    svg.classList.remove("moving");
    if (drag && !drag.moved) keep(entryAt(event.target) ?? null, event.clientX, event.clientY);
    drag = null;
  });
  svg.addEventListener("mousemove", (event) => {
    const entry = entryAt(event.target);
    if (kept || drag?.moved) return;
    if (entry) show(entry, event.clientX, event.clientY);
    else details.hidden = true;
  });
  svg.addEventListener("mouseleave", () => {
    if (!kept) details.hidden = true;
  });
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const bad = entries.filter((entry) => entry.s);
    switch (event.key) {
      case "+": case "=": zoom(1.25); break;
      case "-": zoom(0.8); break;
      case "0": fit(); break;
      case "ArrowDown": view.y += 60 / view.k; redraw(); break;
      case "ArrowUp": view.y -= 60 / view.k; redraw(); break;
      case "PageDown": view.y += 0.8 * svg.clientHeight / view.k; redraw(); break;
      case "PageUp": view.y -= 0.8 * svg.clientHeight / view.k; redraw(); break;
      case "Home": view.y = 0; redraw(); break;
      case "End": view.y = layout.height; redraw(); break;
      case "n": case "p":
        if (!bad.length) return;
        current = (current + (event.key === "n" ? 1 : bad.length - 1) + bad.length) % bad.length;
        goTo(bad[current]);
        break;
      case "Escape": keep(null); break;
      default: return;
    }
    event.preventDefault();
  });
  byId("in").onclick = () => zoom(1.25);
  byId("out").onclick = () => zoom(0.8);
  byId("fit").onclick = fit;
  addEventListener("resize", redraw);

  fillTotals();
  fillChoices();
  fillProblems();
  byId("empty").hidden = entries.length > 0;
  arrange();
  view.k = Math.max(0.6, Math.min(1, svg.clientWidth / layout.width));
  limit();
  draw();
})();
