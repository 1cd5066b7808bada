// Words that all parts share: elements, figures for people, timelines ready to be looked up.
const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const el = (tag, text, cls) => {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls;
  return e;
};
const codeOf = (text) => {
  // of a module or a file: broken between its parts only
  const e = el("code");
  for (const part of text.split(/(?<=[./_:])/)) e.append(part, el("wbr"));
  return e;
};
const three = (v) =>
  Math.abs(v) >= 99.95 ? v.toFixed(0) : Math.abs(v) >= 9.995 ? v.toFixed(1) : v.toFixed(2);
const time = (us) =>
  Math.abs(us) >= 1e6
    ? three(us / 1e6) + " s"
    : Math.abs(us) >= 1e3
      ? three(us / 1e3) + " ms"
      : three(us) + " µs";
const size = (b) => {
  for (const [unit, k] of [
    ["TiB", 40],
    ["GiB", 30],
    ["MiB", 20],
    ["KiB", 10],
  ])
    if (Math.abs(b) >= 2 ** k) return three(b / 2 ** k) + " " + unit;
  return Math.round(b) + " B";
};
const percent = (x) => (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + "%";
// Of a text that is made for terminals, too.
const plain = (text) => text.replace(/(\d) us\b/g, "$1 µs").replace("->", "→");
const sum = (list, f) => list.reduce((total, x) => total + f(x), 0);

// A span is a list: these are its places.
const S = {
  STREAM: 0,
  FROM: 1,
  TO: 2,
  NAME: 3,
  OP: 4,
  MODULE: 5,
  SOURCE: 6,
  COLLECTIVE: 7,
  MATMUL: 8,
};

// -- state: which timeline, which part of it, what is chosen
let which = 0,
  from = 0,
  to = 1,
  chosen = null,
  marked = new Set();
const longest = Math.max(
  ...DATA.timelines.map((t) => t.step_us),
  ...DATA.run.lanes.map((l) => l.end_us),
  1e-3,
);
const T = () => DATA.timelines[which];

for (const t of DATA.timelines) {
  t.lanes = t.streams.map(() => []); // spans by stream, in the order of time, for binary search
  t.spanOf = new Map();
  for (const s of t.spans) {
    t.lanes[s[S.STREAM]].push(s);
    if (s[S.COLLECTIVE] >= 0) t.spanOf.set(s[S.COLLECTIVE], s);
  }
  for (const lane of t.lanes) lane.sort((a, b) => a[S.FROM] - b[S.FROM]);
  t.products = t.lanes[0].filter((s) => s[S.MATMUL]);
  t.others = t.lanes[0].filter((s) => !s[S.MATMUL]);
  t.blocked.sort((a, b) => a[0] - b[0]);
  // [from, to] of the times that compute stands still, by the stream that it is for
  t.exposed = t.streams.map(() => []);
  for (const b of t.blocked)
    if (t.spanOf.has(b[2])) t.exposed[t.spanOf.get(b[2])[S.STREAM]].push(b);
  t.calls = Object.entries(t.collectives).map(([id, c]) =>
    Object.assign(c, { id: +id, us: c.exposed_us + c.hidden_us }),
  );
}

// The first of a list in the order of time that ends after us; `end` is the place of its end.
function firstAfter(list, us, end = S.TO) {
  let a = 0,
    b = list.length;
  while (a < b) {
    const m = (a + b) >> 1;
    if (list[m][end] <= us) a = m + 1;
    else b = m;
  }
  return a;
}
