// The address holds what is shown, so that it can be sent to somebody:
// #by=module&filter=bwd&call=17.
function remember() {
  const state = new URLSearchParams();
  if (DATA.timelines.length > 1 && which !== DATA.timelines.length - 1)
    state.set("timeline", which);
  if (by !== "line") state.set("by", by);
  if ($("filter").value) state.set("filter", $("filter").value);
  const row = document.querySelector("#rows tr.on");
  if (row) state.set("row", row.dataset.key);
  else if (chosen !== null) state.set("call", chosen);
  const text = state.toString();
  if (text !== location.hash.slice(1)) history.replaceState(null, "", "#" + text);
}
function recall() {
  const state = new URLSearchParams(location.hash.slice(1)),
    t = +(state.get("timeline") ?? DATA.timelines.length - 1);
  by = state.get("by") in BY ? state.get("by") : "line";
  $("by").value = by;
  $("filter").value = state.get("filter") || "";
  switchTo(t in DATA.timelines ? t : 0);
  fit();
  const call = T().spanOf.get(+state.get("call")),
    row = rowsShown().find((r) => r.key === state.get("row"));
  const one = (state.get("row") || "").match(/^call (\d+)$/),
    single = one && T().collectives[one[1]];
  if (row || single) {
    openRow(
      row || rowOf("call " + one[1], [single]),
      [...$("rows").children].find((tr) => tr.dataset.key === state.get("row")),
    );
  } else if (state.has("call") && call) {
    choose(call);
    $("lanes").scrollIntoView({ block: "start" });
  }
}
function switchTo(i) {
  which = i;
  chosen = null;
  unmark();
  $("body").classList.remove("open");
  [...$("toggle").children].forEach((b, k) => b.setAttribute("aria-pressed", k === i));
  head();
  table();
  resize();
}
if (DATA.timelines.length > 1)
  DATA.names.forEach((name, i) => {
    const b = el("button", name);
    b.onclick = () => {
      switchTo(i);
      remember();
    };
    $("toggle").append(b);
  });
for (const name of Object.keys(BY)) $("by").append(el("option", name));
$("by").onchange = () => {
  by = $("by").value;
  unfolded = new Set();
  table();
  remember();
};
$("filter").oninput = () => {
  table();
  remember();
};
let wasNarrow = window.innerWidth < 700;
window.addEventListener("resize", () => {
  resize();
  if (wasNarrow !== (wasNarrow = window.innerWidth < 700)) table();
});
window.addEventListener("hashchange", recall);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColors();
  draw();
});
readColors();
showAdvice();
showGain();
showRun();
recall();
window.fcollReport = {
  at,
  choose,
  show,
  fit,
  switchTo,
  laneTop,
  LANE,
  LEFT,
  RIGHT,
  x: (us) => x(us),
  timeline: T,
  chosen: () => chosen,
  paint,
  view: () => [from, to],
  columns,
  colors: () => colors,
  svgText,
  asText: () => asText(rowsShown()),
  asCsv: () => asCsv(rowsShown()),
};
