// What stands on top: the verdict, figures, advice, what was gained, what a run measured.
function tile(label, value, note, alarm) {
  const d = el("div", undefined, alarm ? "tile alarm" : "tile");
  d.append(el("span", label), el("b", value), el("i", note || ""));
  $("tiles").append(d);
}
function head() {
  const t = T(),
    o = DATA.timelines.length > 1 ? DATA.timelines[1 - which] : null;
  const against = (a, b) =>
    !o || !b
      ? ""
      : Math.abs(a - b) < 5e-4 * b
        ? `as ${DATA.names[1 - which]}`
        : `${percent(Math.abs(a - b) / b)} ${a < b ? "less" : "more"} than ` +
          DATA.names[1 - which];
  const share = (us) => percent(us / (t.step_us || 1)) + " of the step";
  document.title = "fcoll: " + DATA.title;
  $("verdict").textContent = t.verdict;
  $("verdict").classList.toggle("alarm", !!t.over);
  $("about").textContent = [DATA.title, t.machine, t.mesh, "rank " + t.rank]
    .filter(Boolean)
    .join(" · ");
  $("tiles").replaceChildren();
  tile("step", time(t.step_us), against(t.step_us, o && o.step_us));
  tile("compute", time(t.compute_us), share(t.compute_us));
  tile("exposed communication", time(t.exposed_us), share(t.exposed_us));
  tile("hidden communication", time(t.hidden_us), t.collectives_count + " collectives");
  if (t.tail_us > 1e-3 * t.step_us)
    tile("that no one waits for", time(t.tail_us), "communication after the last compute");
  if (t.host_us > 0) tile("waiting for the host", time(t.host_us), share(t.host_us));
  const peak = t.over || against(t.peak_bytes, o && o.peak_bytes);
  tile("peak memory", size(t.peak_bytes), peak, t.over);
  $("split").replaceChildren();
  for (const [part, color] of [
    [t.compute_us, "matmul"],
    [t.exposed_us, "exposed"],
    [t.tail_us, "hidden"],
  ]) {
    const d = el("div");
    d.style.width = (100 * part) / (t.step_us || 1) + "%";
    d.style.background = `var(--${color})`;
    $("split").append(d);
  }
}
function showAdvice() {
  const box = $("advice"),
    most = 3;
  if (!DATA.advice.length) return;
  box.hidden = false;
  box.append(adviceList(DATA.advice.slice(0, most)));
  if (DATA.advice.length > most) {
    const more = el("details");
    more.append(
      el("summary", `${DATA.advice.length - most} more`),
      adviceList(DATA.advice.slice(most)),
    );
    box.append(more);
  }
}
function adviceList(items) {
  const ol = el("ol", undefined, "advice");
  for (const a of items) {
    const li = el("li"),
      gained = el("div"),
      words = el("div"),
      where = el("div", undefined, "soft");
    gained.append(el("b", "−" + time(a.saved_us)), el("i", percent(a.share) + " of the step"));
    if (a.source) where.append(el("code", a.source));
    where.append(
      [
        a.phase && " " + a.phase,
        a.more_bytes >= 2 ** 20 && " " + size(a.more_bytes) + " more memory",
        a.more_bytes <= -(2 ** 20) && " " + size(-a.more_bytes) + " less memory",
      ]
        .filter(Boolean)
        .join(" ·"),
    );
    words.append(el("div", plain(a.what)), where);
    li.append(gained, words);
    if (a.source) li.onclick = () => toLine(a.source);
    ol.append(li);
  }
  return ol;
}
function toLine(source) {
  setFilter(source);
  $("calls").scrollIntoView({ block: "nearest" });
}
const pair = (show, [a, b]) => (show(a) === show(b) ? show(a) : show(a) + " → " + show(b));
function lineCell(source) {
  const td = el("td", undefined, "source");
  td.append(codeOf(source));
  return td;
}

function showGain() {
  if (!DATA.gain) return;
  $("gain").hidden = false;
  $("gain").textContent = plain(DATA.gain);
  $("verdict").style.cssText = "font-size:15px;font-weight:500";
  if (!DATA.moved.length) return;
  $("moved").hidden = false;
  $("moves").textContent = DATA.names.join(" → ");
  for (const m of DATA.moved) {
    const tr = el("tr");
    tr.append(
      el("td", m.op),
      el("td", m.axis),
      el("td", m.phase),
      el("td", pair(String, m.count), "arrow"),
      el("td", pair(time, m.lead_us), "arrow"),
      el("td", pair(time, m.exposed_us), "arrow"),
      lineCell(m.source),
    );
    tr.onclick = () => toLine(m.source);
    $("moved").querySelector("tbody").append(tr);
  }
}
function showRun() {
  const run = DATA.run;
  if (!run.title) return;
  $("against").hidden = false;
  $("run").textContent = run.title;
  for (const note of run.notes) $("runnotes").append(el("li", plain(note)));
  for (const r of run.rows) {
    const tr = el("tr");
    tr.append(
      el("td", r.op),
      el("td", r.axis),
      el("td", r.phase),
      el("td", r.count, "num"),
      el("td", size(r.bytes), "num"),
      el("td", time(r.us), "num"),
      el("td", time(r.measured_us), "num"),
      el("td", three(r.ratio) + "×", "num"),
      el("td", time(r.exposed_us), "num"),
      el("td", time(r.measured_exposed_us), "num"),
      lineCell(r.source),
    );
    if (r.source) tr.onclick = () => toLine(r.source);
    $("against").querySelector("tbody").append(tr);
  }
}
