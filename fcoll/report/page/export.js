// Out of the page: text, CSV, links, PNG and SVG.
async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // not allowed here: the old way
    const box = el("textarea", text);
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
  }
  const before = button.textContent;
  button.textContent = "copied";
  setTimeout(() => {
    button.textContent = before;
  }, 1200);
}
function save(name, blob) {
  const a = el("a"),
    address = URL.createObjectURL(blob);
  a.setAttribute("href", address);
  a.setAttribute("download", name);
  a.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}
const TEXT_COLUMNS = COLUMNS.filter(([key]) => key !== "bar");
function asText(rows) {
  const cells = [
    TEXT_COLUMNS.map((c) => c[1]),
    ...rows.map((r) => TEXT_COLUMNS.map(([key, , , show]) => String(show ? show(r[key]) : r[key]))),
  ];
  const widths = TEXT_COLUMNS.map((_, i) => Math.max(...cells.map((row) => row[i].length)));
  return (
    cells
      .map((row) =>
        row
          .map((c, i) => (TEXT_COLUMNS[i][2] ? c.padStart(widths[i]) : c.padEnd(widths[i])))
          .join("  ")
          .trimEnd(),
      )
      .join("\n") + "\n"
  );
}
function asCsv(rows) {
  const quote = (v) =>
    /[",\n]/.test(String(v)) ? `"${String(v).replace(/"/g, '""')}"` : String(v);
  const keys = [...TEXT_COLUMNS.map((c) => c[0]), "hidden_us"];
  return (
    [keys, ...rows.map((r) => keys.map((k) => r[k]))]
      .map((row) => row.map(quote).join(","))
      .join("\n") + "\n"
  );
}
// Takes what the lanes ask of a canvas, and writes SVG.
class SvgPen {
  constructor() {
    this.parts = [];
    this.path = "";
    this.dash = "";
  }
  add(tag, attributes, text) {
    const e = document.createElementNS($("namespace").content.firstElementChild.namespaceURI, tag);
    for (const k in attributes)
      e.setAttribute(
        k,
        typeof attributes[k] === "number" ? +attributes[k].toFixed(2) : attributes[k],
      );
    if (text !== undefined) e.textContent = text;
    this.parts.push(e);
    return e;
  }
  measureText(text) {
    screenPen.font = this.font;
    return screenPen.measureText(text);
  }
  fillRect(x, y, width, height) {
    this.add("rect", { x, y, width, height, fill: this.fillStyle });
  }
  fillText(text, x, y) {
    const [size] = this.font.match(/[\d.]+(?=px)/),
      weight = /^600/.test(this.font) ? 600 : 400;
    this.add(
      "text",
      {
        x,
        y: y + size * 0.35,
        fill: this.fillStyle,
        "font-size": size,
        "font-weight": weight,
        "font-family": "system-ui, sans-serif",
      },
      text,
    );
  }
  beginPath() {
    this.path = "";
  }
  moveTo(x, y) {
    this.path += `M${x.toFixed(2)},${y.toFixed(2)}`;
  }
  lineTo(x, y) {
    this.path += `L${x.toFixed(2)},${y.toFixed(2)}`;
  }
  closePath() {
    this.path += "Z";
  }
  arc(x, y, r) {
    this.path += `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0`;
  }
  setLineDash(dash) {
    this.dash = dash.join();
  }
  fill() {
    this.add("path", { d: this.path, fill: this.fillStyle });
  }
  stroke() {
    this.add("path", {
      d: this.path,
      fill: "none",
      stroke: this.strokeStyle,
      "stroke-width": this.lineWidth,
      "stroke-dasharray": this.dash,
    });
  }
}
function svgText() {
  const writer = new SvgPen();
  pen = writer;
  try {
    paint();
  } finally {
    pen = screenPen;
  }
  const root = writer.add("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  root.append(
    writer.add("title", {}, `${DATA.title}: ${T().verdict}`),
    ...writer.parts.filter((e) => e !== root && e.tagName !== "title"),
  );
  return new XMLSerializer().serializeToString(root);
}
$("copy").onclick = () => copy(asText(rowsShown()), $("copy"));
$("csv").onclick = () =>
  save("collectives.csv", new Blob([asCsv(rowsShown())], { type: "text/csv" }));
$("svg").onclick = () => save("timeline.svg", new Blob([svgText()], { type: "image/svg+xml" }));
$("png").onclick = () => {
  paint();
  canvas.toBlob((blob) => save("timeline.png", blob));
};
$("link").onclick = () => {
  remember();
  copy(location.href, $("link"));
};
