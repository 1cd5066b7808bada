// The lanes. A column of pixels shows how the time in it is spent: each colour's height is its
// share, so that the area of a colour is its time at every zoom, and what is shorter than a pixel
// is still seen.
const canvas = $("canvas"),
  screenPen = canvas.getContext("2d");
let pen = screenPen; // or one that writes SVG
const LEFT = 92,
  RIGHT = 14,
  AXIS = 24,
  LANE = 38,
  GAP = 12,
  RUN = 14;
let MEMORY = 96;
let colors = {},
  width = 0,
  height = 0,
  ratio = 1,
  queued = false;
const NAMES = [
  "page",
  "card",
  "ink",
  "soft",
  "line",
  "grid",
  "matmul",
  "other",
  "hidden",
  "exposed",
  "exposed-soft",
  "memory",
  "memory-soft",
  "alarm",
  "run",
  "focus",
];
function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of NAMES) colors[name] = style.getPropertyValue("--" + name).trim();
}
const draw = () => {
  if (!queued) {
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      paint();
    });
  }
};
const x = (us) => LEFT + ((us - from) / (to - from)) * (width - LEFT - RIGHT);
const usAt = (px) => from + ((px - LEFT) / (width - LEFT - RIGHT)) * (to - from);
const runLane = (t, i) => DATA.run.lanes.find((l) => l.stream === t.streams[i]);
function laneTop(i) {
  // a stream with a measured lane is so much taller
  const t = T();
  let top = AXIS + GAP;
  for (let k = 0; k < i; k++) top += LANE + GAP + (runLane(t, k) ? RUN + 2 : 0);
  return top;
}
function resize() {
  ratio = window.devicePixelRatio || 1;
  width = $("stage").clientWidth;
  const beside = $("body").classList.contains("open") && window.innerWidth > 900;
  MEMORY = beside ? 200 : 96; // there is room beside the panel
  height = laneTop(T().streams.length) + MEMORY + 14;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = height + "px";
  draw();
}
function paint() {
  const t = T();
  if (pen === screenPen) pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.fillStyle = colors.card;
  pen.fillRect(0, 0, width, height);
  paintAxis();
  t.streams.forEach((name, i) => {
    const top = laneTop(i);
    label(name, top + LANE / 2);
    pen.fillStyle = colors.grid;
    pen.fillRect(LEFT, top, width - LEFT - RIGHT, LANE);
    paintLane(t, i, top);
    const run = runLane(t, i);
    if (run) paintRun(run, top + LANE + 2);
  });
  paintMemory(t);
  paintLinks(t);
}
function label(text, y, font = "600 12.5px") {
  pen.fillStyle = colors.ink;
  pen.font = font + " system-ui, sans-serif";
  pen.textBaseline = "middle";
  pen.fillText(clip(text, LEFT - 22), 14, y);
}
function clip(text, room) {
  if (pen.measureText(text).width <= room) return text;
  while (text && pen.measureText(text + "…").width > room) text = text.slice(0, -1);
  return text + "…";
}
function paintAxis() {
  const room = (to - from) / Math.max(1, (width - LEFT - RIGHT) / 110);
  const power = 10 ** Math.floor(Math.log10(room));
  const step = power * [1, 2, 5, 10].find((k) => k * power >= room);
  pen.font = "11.5px system-ui, sans-serif";
  pen.textBaseline = "middle";
  for (let us = Math.ceil(from / step) * step; us <= to; us += step) {
    pen.fillStyle = colors.grid;
    pen.fillRect(x(us), AXIS - 4, 1, height - AXIS - 8);
    const text = us === 0 ? "0" : tick(us, step);
    pen.fillStyle = colors.soft;
    if (x(us) + 3 + pen.measureText(text).width <= width)
      pen.fillText(text, x(us) + 3, AXIS / 2 + 3);
  }
}
function tick(us, step) {
  const [k, unit] = to >= 1e6 ? [1e6, " s"] : to >= 1e3 ? [1e3, " ms"] : [1, " µs"];
  return (us / k).toFixed(Math.max(0, Math.ceil(-Math.log10(step / k) - 1e-9))) + unit;
}

// -- columns
const columns = () => Math.max(1, Math.round((width - LEFT - RIGHT) * ratio));
// Adds the time of [a, b) to the columns that it falls into, as a share of each.
function cover(into, a, b) {
  const n = into.length,
    k = n / (to - from);
  const low = Math.max((a - from) * k, 0),
    high = Math.min((b - from) * k, n);
  if (high <= low) return;
  const first = Math.floor(low),
    last = Math.min(Math.floor(high), n - 1);
  if (first === last) {
    into[first] += high - low;
    return;
  }
  into[first] += first + 1 - low;
  for (let i = first + 1; i < last; i++) into[i] = 1;
  into[last] += high - last;
}
function coverAll(list, begin, end) {
  const into = new Float64Array(columns());
  for (let i = firstAfter(list, from, end); i < list.length && list[i][begin] < to; i++)
    cover(into, list[i][begin], list[i][end]);
  return into;
}
// Kinds on top of each other, from the bottom: [colour, shares]. Equal neighbours are one box.
function paintColumns(kinds, top, tall) {
  const n = columns(),
    wide = (width - LEFT - RIGHT) / n,
    pixel = 1 / ratio;
  let start = 0,
    before = null;
  for (let i = 0; i <= n; i++) {
    let heights = null,
      key = "";
    if (i < n) {
      let used = 0;
      heights = kinds.map(([, shares]) => {
        const h =
          shares[i] > 1e-6 ? Math.max(Math.round(shares[i] * tall * ratio) / ratio, pixel) : 0;
        const fits = Math.min(h, tall - used);
        used += fits;
        return fits;
      });
      key = heights.join();
    }
    if (before && before.key === key) continue;
    if (before) {
      let y = top + tall;
      before.heights.forEach((h, k) => {
        if (h > 0) {
          pen.fillStyle = kinds[k][0];
          pen.fillRect(LEFT + start * wide, y - h, (i - start) * wide, h);
          y -= h;
        }
      });
    }
    start = i;
    before = { heights, key };
  }
}
function paintLane(t, i, top) {
  const lane = t.lanes[i];
  if (i === 0) {
    const kinds = [
      [colors.matmul, coverAll(t.products, S.FROM, S.TO)],
      [colors.other, coverAll(t.others, S.FROM, S.TO)],
    ];
    paintColumns([...kinds, [colors["exposed-soft"], coverAll(t.blocked, 0, 1)]], top, LANE);
  } else {
    const exposed = coverAll(t.exposed[i], 0, 1),
      hidden = coverAll(lane, S.FROM, S.TO);
    for (let k = 0; k < hidden.length; k++) hidden[k] = Math.max(hidden[k] - exposed[k], 0);
    paintColumns(
      [
        [colors.exposed, exposed],
        [colors.hidden, hidden],
      ],
      top,
      LANE,
    );
  }
  paintSpans(t, lane, top);
}
// What only wide spans have: a name, and a notch where one begins (no more than that: a short
// exposed part must not be covered).
function paintSpans(t, lane, top) {
  const narrow = (to - from) / columns();
  for (let i = firstAfter(lane, from); i < lane.length && lane[i][S.FROM] < to; i++) {
    const s = lane[i],
      c = s[S.COLLECTIVE],
      mine = c >= 0 && (c === chosen || marked.has(c));
    if (s[S.TO] - s[S.FROM] < narrow && !mine) continue;
    const a = Math.max(x(s[S.FROM]), LEFT),
      b = Math.min(x(s[S.TO]), width - RIGHT),
      w = b - a;
    if (w > 12 && a > LEFT) {
      pen.fillStyle = colors.card;
      pen.fillRect(a - 0.5, top, 1, 5);
    }
    if (w > 46) {
      pen.fillStyle = c < 0 && !s[S.MATMUL] ? colors.ink : "#fff";
      pen.font = "11.5px system-ui, sans-serif";
      pen.textBaseline = "middle";
      pen.fillText(clip(t.strings[s[S.OP]].split("::").pop(), w - 10), a + 5, top + LANE / 2);
    }
    if (mine) {
      // below the lane, so that nothing of it is covered
      pen.fillStyle = colors.focus;
      pen.fillRect(a, top + LANE + 1, Math.max(w, 1.5), c === chosen ? 4 : 2);
    }
  }
}
// What was measured, below the lane it was predicted on: a mark for each call.
function paintRun(run, top) {
  label("measured", top + RUN / 2, "11px");
  pen.fillStyle = colors.grid;
  pen.fillRect(LEFT, top, width - LEFT - RIGHT, RUN);
  paintColumns([[colors.run, coverAll(run.spans, 0, 1)]], top, RUN);
}

// -- memory, and the arrows of the chosen one
function paintMemory(t) {
  const top = laneTop(t.streams.length),
    most = Math.max(...DATA.timelines.map((u) => u.peak_bytes), 1);
  const y = (b) => top + MEMORY - 4 - (b / most) * (MEMORY - 22);
  label("memory", top + MEMORY / 2);
  const points = t.memory,
    right = Math.max(Math.min(x(t.step_us), width - RIGHT), LEFT);
  let a = Math.max(firstAfter(points, from, 0) - 1, 0);
  pen.beginPath();
  pen.moveTo(LEFT, top + MEMORY);
  let last = points.length ? points[a][1] : 0,
    px = -1,
    low = 0,
    high = 0;
  const column = () => {
    if (px >= 0) {
      pen.lineTo(px, y(low));
      pen.lineTo(px, y(high));
      pen.lineTo(px, y(last));
    }
  };
  pen.lineTo(LEFT, y(last));
  for (let i = a; i < points.length && points[i][0] <= to; i++) {
    // a column of pixels: its extremes
    const at = Math.round(x(Math.max(points[i][0], from)) * 2) / 2;
    if (at !== px) {
      column();
      px = at;
      low = high = last;
      pen.lineTo(at, y(last));
    }
    last = points[i][1];
    low = Math.min(low, last);
    high = Math.max(high, last);
  }
  column();
  pen.lineTo(right, y(last));
  pen.lineTo(right, top + MEMORY);
  pen.closePath();
  pen.fillStyle = colors["memory-soft"];
  pen.fill();
  pen.strokeStyle = colors.memory;
  pen.lineWidth = 1.3;
  pen.stroke();
  pen.setLineDash([3, 3]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(LEFT, y(t.peak_bytes));
  pen.lineTo(width - RIGHT, y(t.peak_bytes));
  pen.stroke();
  pen.setLineDash([]);
  pen.fillStyle = t.over ? colors.alarm : colors.soft;
  pen.font = "11.5px system-ui, sans-serif";
  pen.fillText("peak " + size(t.peak_bytes) + (t.over && ", " + t.over), LEFT + 6, y(t.peak_bytes) - 8);
}
function paintLinks(t) {
  // issue -> collective -> wait
  if (chosen === null || !t.spanOf.has(chosen)) return;
  const s = t.spanOf.get(chosen),
    lane = laneTop(s[S.STREAM]),
    c = t.collectives[chosen],
    low = laneTop(0) + LANE + 1;
  pen.strokeStyle = colors.focus;
  pen.fillStyle = colors.focus;
  pen.lineWidth = 1.3;
  const arrow = (us1, y1, us2, y2) => {
    if (us1 < from || us2 > to || us1 > to || us2 < from) return;
    pen.beginPath();
    pen.moveTo(x(us1), y1);
    pen.lineTo(x(us2), y2);
    pen.stroke();
    pen.beginPath();
    pen.arc(x(us2), y2, 3, 0, 7);
    pen.fill();
  };
  arrow(c.issued_us, low, s[S.FROM], lane);
  if (c.waited_us !== null) arrow(s[S.TO], lane, c.waited_us, low);
}
