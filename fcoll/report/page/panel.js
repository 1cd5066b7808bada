// The panel: what is chosen, why it is exposed, what hides it, and where it is written.
function facts(box, pairs) {
  const list = el("dl");
  for (const [k, v] of pairs)
    if (v !== "" && v !== null && v !== undefined) list.append(el("dt", k), el("dd", String(v)));
  box.append(list);
}
function code(box, source) {
  box.append(el("h3", source || "no source line"));
  const text = DATA.sources[source];
  if (!text) return;
  const pre = el("pre");
  for (const [number, content, here] of text) {
    const row = el("div", undefined, here ? "here" : "");
    row.append(el("span", number), document.createTextNode(content));
    pre.append(row);
  }
  box.append(pre);
}
function bullets(box, title, texts) {
  if (!texts.length) return;
  const list = el("ul");
  for (const text of texts) list.append(el("li", plain(text)));
  box.append(el("h3", title), list);
}
function bars(box, pairs) {
  const list = el("div", undefined, "bars");
  for (const [name, us] of pairs) {
    const row = el("div");
    row.append(el("span", name), el("span", time(us)));
    list.append(row);
  }
  box.append(list);
}
function hiders(t, s) {
  // compute that runs while s does, by op and line
  const found = new Map(),
    lane = t.lanes[0];
  for (let i = firstAfter(lane, s[S.FROM]); i < lane.length && lane[i][S.FROM] < s[S.TO]; i++) {
    const c = lane[i],
      us = Math.min(c[S.TO], s[S.TO]) - Math.max(c[S.FROM], s[S.FROM]),
      source = t.strings[c[S.SOURCE]];
    const name = t.strings[c[S.OP]].split("::").pop() + (source ? " · " + source : "");
    if (us > 1e-3) found.set(name, (found.get(name) || 0) + us);
  }
  return [...found].sort((a, b) => b[1] - a[1]).slice(0, 8);
}
const helps = (c) =>
  DATA.advice.filter(
    (a) => a.source === c.source && (!a.phase || a.phase === c.phase) && (!a.op || a.op === c.op),
  );

function choose(s) {
  const t = T(),
    box = $("panel"),
    c = s[S.COLLECTIVE] >= 0 ? t.collectives[s[S.COLLECTIVE]] : null;
  chosen = c ? s[S.COLLECTIVE] : null;
  box.replaceChildren();
  const title = el("h2", t.strings[s[S.OP]]),
    copied = el("button", "copy"),
    shut = el("button", "×");
  copied.className = "push";
  copied.title = "this as text";
  copied.onclick = () => copy(panelText(box), copied);
  shut.onclick = close;
  shut.setAttribute("aria-label", "close");
  title.append(copied, shut);
  box.append(title);
  if (c) describe(box, t, s, c);
  else describeStep(box, t, s);
  if (!$("body").classList.contains("open")) {
    $("body").classList.add("open");
    resize();
  }
  draw();
  remember();
}
function describe(box, t, s, c) {
  const meter = el("div", undefined, "meter"),
    part = el("div"),
    run = DATA.run.calls[c.id];
  part.style.width = (c.us ? (100 * c.exposed_us) / c.us : 0) + "%";
  meter.append(part);
  facts(box, [
    ["time", time(c.us)],
    ["exposed", time(c.exposed_us)],
    ["hidden", time(c.hidden_us)],
    [
      "measured",
      which === DATA.timelines.length - 1 && run ? `${time(run[0])}, exposed ${time(run[1])}` : "",
    ],
  ]);
  box.append(meter);
  if (c.why) {
    bullets(box, "why it is exposed", c.why.facts);
    box.querySelector("h3").append(" ", el("span", c.why.cause, "cause"));
  }
  bullets(
    box,
    "what would help",
    helps(c).map((a) => `${a.what} (−${time(a.saved_us)})`),
  );
  const beside = hiders(t, s);
  box.append(el("h3", "hidden behind"));
  if (beside.length) bars(box, beside);
  else
    box.append(
      el(
        "div",
        c.exposed_us > 1e-3
          ? "nothing: compute waits all the time it runs"
          : "nothing is computed while it runs",
        "soft",
      ),
    );
  code(box, c.source);
  box.append(el("h3", "the call"));
  facts(box, [
    ["group", `${c.axis || c.group} (${c.n} ranks)`],
    ["ranks", c.ranks],
    ["bytes", size(c.bytes)],
    ["sends", size(c.wire_bytes) + " a rank"],
    ["tensors", c.tensors],
    ["options", c.args],
    ["phase", c.phase],
    ["module", c.module],
    ["priced as", c.form],
    ["node", c.start + (c.wait ? " → " + c.wait : "")],
  ]);
}
function describeStep(box, t, s) {
  const d = t.steps[t.strings[s[S.NAME]]] || {};
  facts(box, [
    ["time", time(s[S.TO] - s[S.FROM])],
    ["flops", d.flops],
    ["reads", d.read],
    ["writes", d.write],
    ["kernel", d.kernel],
    ["dtype", d.dtype],
    ["phase", d.phase],
    ["module", t.strings[s[S.MODULE]]],
    ["node", t.strings[s[S.NAME]]],
  ]);
  code(box, t.strings[s[S.SOURCE]]);
}
function panelText(box) {
  const lines = [];
  for (const e of box.children) {
    if (e.tagName === "DL")
      for (let i = 0; i < e.children.length; i += 2)
        lines.push(e.children[i].textContent.padEnd(10) + e.children[i + 1].textContent);
    else if (e.tagName === "UL") for (const li of e.children) lines.push("- " + li.textContent);
    else if (e.tagName === "PRE")
      for (const row of e.children)
        lines.push(
          row.firstChild.textContent.padStart(5) +
            (row.className ? " > " : "   ") +
            row.lastChild.textContent,
        );
    else if (e.className === "bars")
      for (const row of e.children)
        lines.push(row.lastChild.textContent.padStart(9) + "  " + row.firstChild.textContent);
    else if (e.tagName === "H2") lines.push(e.firstChild.textContent);
    else if (e.textContent) lines.push(e.textContent);
  }
  return lines.join("\n") + "\n";
}
function unmark() {
  marked = new Set();
  document.querySelectorAll("tbody tr.on").forEach((r) => r.classList.remove("on"));
}
function close() {
  chosen = null;
  unmark();
  if ($("body").classList.contains("open")) {
    $("body").classList.remove("open");
    resize();
  }
  draw();
  remember();
}
