// Moving about in the lanes: wheel, drag, keys, and what is under the pointer.
function show(a, b) {
  const span = Math.min(Math.max(b - a, longest / 1e5), longest * 1.02);
  const middle = (a + b) / 2;
  from = Math.min(Math.max(middle - span / 2, -longest * 0.01), longest * 1.01 - span);
  to = from + span;
  draw();
}
const fit = () => show(0, longest);
const zoom = (k, at = (from + to) / 2) => show(at - (at - from) * k, at + (to - at) * k);
canvas.addEventListener(
  "wheel",
  (e) => {
    e.preventDefault();
    if (e.shiftKey || Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      const d = ((e.deltaX || e.deltaY) / width) * (to - from);
      show(from + d, to + d);
    } else zoom(Math.exp(Math.max(-60, Math.min(60, e.deltaY)) * 0.006), usAt(e.offsetX));
  },
  { passive: false },
);
let drag = null;
canvas.addEventListener("pointerdown", (e) => {
  drag = { at: e.offsetX, from, to, moved: false };
  canvas.setPointerCapture(e.pointerId);
});
canvas.addEventListener("pointermove", (e) => {
  if (drag) {
    if (Math.abs(e.offsetX - drag.at) > 3) {
      drag.moved = true;
      canvas.classList.add("drag");
    }
    if (drag.moved) {
      const d = ((drag.at - e.offsetX) / (width - LEFT - RIGHT)) * (drag.to - drag.from);
      show(drag.from + d, drag.to + d);
    }
  }
  if (e.pointerType !== "touch") tip(e);
});
const drop = () => {
  drag = null;
  canvas.classList.remove("drag");
};
canvas.addEventListener("pointercancel", drop);
canvas.addEventListener("pointerup", (e) => {
  const click = drag && !drag.moved;
  drop();
  if (!click) return;
  const s = at(e.offsetX, e.offsetY);
  if (s) {
    unmark();
    choose(s);
  } else close();
});
canvas.addEventListener("pointerleave", () => {
  $("tip").style.display = "none";
});
canvas.addEventListener("dblclick", fit);
canvas.addEventListener("keydown", (e) => {
  const d = (to - from) / 8;
  const act = {
    ArrowLeft: () => show(from - d, to - d),
    ArrowRight: () => show(from + d, to + d),
    "+": () => zoom(0.6),
    "=": () => zoom(0.6),
    "-": () => zoom(1 / 0.6),
    0: fit,
    Escape: close,
  }[e.key];
  if (act) {
    e.preventDefault();
    act();
  }
});
$("in").onclick = () => zoom(0.5);
$("out").onclick = () => zoom(2);
$("fit").onclick = fit;

// The span at a place of the canvas; where compute stands still, the collective it waits for.
function at(px, py) {
  const t = T(),
    lane = t.streams.findLastIndex((_, i) => py >= laneTop(i)),
    low = py - laneTop(lane) - LANE;
  if (lane < 0 || px < LEFT) return null;
  const us = usAt(px),
    near = ((to - from) / width) * 2,
    run = runLane(t, lane);
  if (low >= 0) {
    // below the lane: what was measured
    const call =
      run && low < RUN + 2 && run.spans.find((r) => r[0] <= us + near && us - near < r[1]);
    return call ? t.spanOf.get(call[2]) : null;
  }
  const s = nearest(t.lanes[lane], us, near);
  if (s) return s;
  const b = lane === 0 && t.blocked.find((b) => b[0] <= us && us < b[1]);
  return b ? t.spanOf.get(b[2]) : null;
}
function nearest(lane, us, near) {
  // the one under the pointer; else the longest within reach
  let best = null;
  for (let i = firstAfter(lane, us - near); i < lane.length && lane[i][S.FROM] <= us + near; i++) {
    const s = lane[i];
    if (s[S.FROM] <= us && us < s[S.TO]) return s;
    if (!best || s[S.TO] - s[S.FROM] > best[S.TO] - best[S.FROM]) best = s;
  }
  return best;
}
function tip(e) {
  const s = drag && drag.moved ? null : at(e.offsetX, e.offsetY),
    box = $("tip"),
    t = T();
  if (!s) {
    box.style.display = "none";
    return;
  }
  const c = s[S.COLLECTIVE] >= 0 ? t.collectives[s[S.COLLECTIVE]] : null;
  const extra = c
    ? ` · ${size(c.bytes)} · exposed ${time(c.exposed_us)}` + (c.why ? ` (${c.why.cause})` : "")
    : "";
  const written = t.strings[s[S.SOURCE]] || t.strings[s[S.NAME]];
  box.textContent = `${t.strings[s[S.OP]]} · ${time(s[S.TO] - s[S.FROM])}${extra} · ${written}`;
  box.style.display = "block";
  box.style.left = Math.max(Math.min(e.offsetX + 14, width - box.offsetWidth - 6), 0) + "px";
  box.style.top = Math.min(e.offsetY + 22, height - box.offsetHeight - 4) + "px";
}
