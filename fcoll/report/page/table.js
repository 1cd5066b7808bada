// The table: calls put together by line, module, layer, axis, phase, op or cause; a row can be
// opened to its calls.
const layerOf = (module) => {
  // layers.3.attention.wo -> layers.3
  const parts = module.split("."),
    i = parts.findIndex((p) => /^\d+$/.test(p));
  return i < 0 ? module : parts.slice(0, i + 1).join(".");
};
const where = (c) => [c.op, c.axis || c.group, c.n, c.phase];
const BY = {
  line: (c) => [...where(c), c.source],
  module: (c) => [c.module],
  layer: (c) => [layerOf(c.module)],
  "module kind": (c) => [c.module.replace(/\b\d+\b/g, "*")],
  axis: (c) => [c.axis || c.group],
  phase: (c) => [c.phase],
  collective: (c) => [c.op],
  why: (c) => [c.why ? c.why.cause : ""],
  call: (c) => [c.id],
};
const COLUMNS = [
  ["op", "collective"],
  ["axis", "axis"],
  ["n", "n", 1],
  ["phase", "phase"],
  ["module", "module"],
  ["count", "calls", 1],
  ["bytes", "bytes", 1, size],
  ["us", "time", 1, time],
  ["exposed_us", "exposed", 1, time],
  ["bar", ""],
  ["why", "why"],
  ["source", "line"],
];
// On a phone what is asked first comes first; the rest is reached by scrolling.
const FIRST = ["op", "exposed_us", "why", "axis", "phase", "count"];
const place = ([key]) => (FIRST.includes(key) ? FIRST.indexOf(key) : FIRST.length);
const columnsNow = () =>
  window.innerWidth < 700 ? [...COLUMNS].sort((a, b) => place(a) - place(b)) : COLUMNS;
let by = "line",
  order = { key: "exposed_us", down: true },
  unfolded = new Set();

// One text for many: what they have in common.
function common(texts, many) {
  const all = [...new Set(texts)];
  if (all.length === 1) return all[0];
  const filled = all.filter(Boolean);
  if (
    all.length === filled.length &&
    filled.every((t) => t.replace(/\b\d+\b/g, "*") === filled[0].replace(/\b\d+\b/g, "*"))
  )
    return filled[0].replace(/\b\d+\b/g, "*");
  return all.length <= 2 ? all.map((t) => t || "(none)").join(", ") : `${all.length} ${many}`;
}
function rowOf(key, calls) {
  const causes = new Map();
  for (const c of calls)
    if (c.why) causes.set(c.why.cause, (causes.get(c.why.cause) || 0) + c.exposed_us);
  const cause = [...causes].sort((a, b) => b[1] - a[1]);
  const row = { key, calls, count: calls.length, why: cause.length ? cause[0][0] : "" };
  const many = { op: "collectives", phase: "phases", module: "modules", source: "lines" };
  for (const name in many)
    row[name] = common(
      calls.map((c) => c[name]),
      many[name],
    );
  row.axis = common(
    calls.map((c) => c.axis || c.group),
    "groups",
  );
  row.n = common(
    calls.map((c) => String(c.n)),
    "sizes",
  );
  for (const name of ["bytes", "us", "exposed_us", "hidden_us"])
    row[name] = sum(calls, (c) => c[name]);
  return row;
}
function rowsShown() {
  const groups = new Map();
  for (const c of filtered(T().calls, $("filter").value)) {
    const key = BY[by](c).join("|");
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(c);
  }
  const rows = [...groups].map(([key, calls]) => rowOf(key, calls));
  if (by === "layer" || by === "module kind") for (const r of rows) r.module = r.key;
  return sorted(rows);
}
function sorted(rows) {
  const sign = order.down ? -1 : 1,
    natural = new Intl.Collator("en", { numeric: true });
  return rows.sort((a, b) => {
    const p = a[order.key],
      q = b[order.key];
    return (
      sign * (typeof p === "number" ? p - q : natural.compare(p, q)) ||
      a.calls[0].id - b.calls[0].id
    );
  });
}
function table() {
  const body = $("rows"),
    rows = rowsShown(),
    most = Math.max(...rows.map((r) => r.us), 1e-9);
  tableHead();
  body.replaceChildren();
  for (const r of rows) {
    body.append(tableRow(r, most));
    if (unfolded.has(r.key))
      for (const c of r.calls) body.append(tableRow(rowOf("call " + c.id, [c]), most, c));
  }
  const calls = sum(rows, (r) => r.count),
    all = T().calls.length;
  const many = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  const shown = calls < all ? `${calls} of ${many(all, "call")}` : many(all, "call");
  const exposed = time(sum(rows, (r) => r.exposed_us));
  $("count").textContent = `${many(rows.length, "row")}, ${shown}, ${exposed} exposed`;
}
function tableHead() {
  const head = $("columns");
  head.replaceChildren();
  for (const [key, name, num] of columnsNow()) {
    const th = el("th", name, num ? "num" : "");
    if (name) {
      th.tabIndex = 0;
      th.onclick = () => {
        order = { key, down: order.key === key ? !order.down : !!num };
        table();
      };
      th.onkeydown = (e) => {
        if (e.key === "Enter") th.onclick();
      };
      if (order.key === key) th.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    }
    head.append(th);
  }
}
function tableRow(r, most, call) {
  const tr = el("tr", undefined, call ? "call" : "");
  tr.tabIndex = 0;
  tr.dataset.key = r.key;
  for (const [key, , num, show] of columnsNow()) tr.append(cell(r, key, num, show, most));
  if (!call && r.count > 1) tr.firstChild.prepend(fold(r));
  tr.onclick = () => openRow(r, tr);
  tr.onkeydown = (e) => {
    if (e.key === "Enter" && e.target === tr) openRow(r, tr);
  };
  if (r.calls.every((c) => marked.has(c.id)) && marked.size === r.count) tr.classList.add("on");
  return tr;
}
function cell(r, key, num, show, most) {
  const td = el("td", undefined, num ? "num" : key);
  if (key === "bar") {
    const bar = el("div"),
      part = el("div");
    bar.style.width = (100 * r.us) / most + "%";
    part.style.width = (r.us ? (100 * r.exposed_us) / r.us : 0) + "%";
    bar.append(part);
    td.append(bar);
  } else if (key === "why") {
    if (r.why) {
      td.append(el("span", r.why, "cause"));
      td.title = DATA.causes[r.why];
    }
  } else if (key === "source" || key === "module") td.append(codeOf(r[key]));
  else if (key === "op") td.append(el("code", r[key]));
  else td.textContent = show ? show(r[key]) : r[key];
  return td;
}
function fold(r) {
  const open = unfolded.has(r.key),
    b = el("button", open ? "▾" : "▸", "fold");
  b.setAttribute("aria-label", open ? "hide the calls" : "show the calls");
  b.setAttribute("aria-expanded", open);
  b.onclick = (e) => {
    e.stopPropagation();
    open ? unfolded.delete(r.key) : unfolded.add(r.key);
    table();
  };
  return b;
}
// A row leads to its most exposed call: marked in the lanes, which come into view.
function openRow(r, tr, scroll = true) {
  const t = T(),
    worst = r.calls.reduce((a, b) => (b.exposed_us > a.exposed_us ? b : a)),
    s = t.spanOf.get(worst.id);
  unmark();
  marked = new Set(r.calls.map((c) => c.id));
  if (tr) tr.classList.add("on");
  if (!s) return;
  choose(s);
  const w = Math.max((s[S.TO] - s[S.FROM]) * 8, longest / 60),
    middle = (s[S.FROM] + s[S.TO]) / 2;
  show(middle - w / 2, middle + w / 2);
  if (scroll) $("lanes").scrollIntoView({ block: "start" });
}
function setFilter(text) {
  $("filter").value = text;
  table();
  remember();
}
