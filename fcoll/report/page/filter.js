// What people type: words that must all match, -word to leave out, key:word for one property,
// exposed>1ms for figures.
const UNITS = {
  us: 1,
  µs: 1,
  ms: 1e3,
  s: 1e6,
  b: 1,
  kb: 2 ** 10,
  kib: 2 ** 10,
  mb: 2 ** 20,
  mib: 2 ** 20,
  gb: 2 ** 30,
  gib: 2 ** 30,
};
const FIGURES = {
  exposed: "exposed_us",
  time: "us",
  us: "us",
  hidden: "hidden_us",
  bytes: "bytes",
  size: "bytes",
  n: "n",
  ranks: "n",
};
const PHASES = { fwd: "fwd forward", bwd: "bwd backward", opt: "opt optimizer" };
const SHORT = {
  all_gather_into_tensor: "allgather ag",
  reduce_scatter_tensor: "reducescatter rs",
  all_reduce: "allreduce ar",
  all_to_all_single: "alltoall a2a",
  isend: "send p2p",
  irecv: "recv receive p2p",
  batch_isend_irecv: "sendrecv p2p",
};

function propertiesOf(c) {
  if (!c.words) {
    const p = {
      op: `${c.op} ${SHORT[c.op] || ""}`,
      axis: c.axis || c.group,
      phase: PHASES[c.phase] || c.phase,
      module: c.module,
      line: c.source,
      why: c.why ? c.why.cause : "",
      state: c.exposed_us > 1e-3 ? "exposed" : "hidden",
      tensors: c.tensors,
      node: c.start,
    };
    p.source = p.line;
    p.group = p.axis;
    p.layer = layerOf(c.module);
    for (const key in p) p[key] = p[key].toLowerCase();
    c.words = p;
    c.text = [
      p.op,
      p.op.replace(/_/g, ""),
      p.axis,
      p.phase,
      p.module,
      p.line,
      p.why,
      p.state,
      p.tensors,
    ].join("\n");
  }
  return c.words;
}
// Words of one or two letters are whole words (ar is not in forward), and a number is a whole
// number: layers.3 is not layers.31.
function has(text, word) {
  const letter = /[a-z0-9]/,
    digit = /\d/,
    none = /^.{2}/,
    short = word.length < 3;
  const notAfter = short ? letter : digit.test(word[0]) ? digit : none,
    notBefore = short ? letter : digit.test(word.at(-1)) ? digit : none;
  for (let i = text.indexOf(word); i >= 0; i = text.indexOf(word, i + 1)) {
    if (!notAfter.test(text[i - 1] || "") && !notBefore.test(text[i + word.length] || ""))
      return true;
  }
  return false;
}
function matcher(word) {
  if (word.startsWith("-") && word.length > 1) {
    const not = matcher(word.slice(1));
    return (c) => !not(c);
  }
  const figure = word.match(/^(\w+)(>=|<=|>|<|=)([\d.]+)([a-zµ]*)$/);
  if (figure && FIGURES[figure[1]] && (figure[4] in UNITS || !figure[4])) {
    const key = FIGURES[figure[1]],
      v = +figure[3] * (UNITS[figure[4]] || 1);
    return {
      ">": (c) => c[key] > v,
      "<": (c) => c[key] < v,
      ">=": (c) => c[key] >= v,
      "<=": (c) => c[key] <= v,
      "=": (c) => c[key] === v,
    }[figure[2]];
  }
  const [key, ...rest] = word.split(":"),
    value = rest.join(":");
  const flat = (w) => w.replace(/[-_]/g, "");
  return (c) => {
    const p = propertiesOf(c);
    if (value && key in p) return has(p[key], value) || has(flat(p[key]), flat(value));
    return has(c.text, word) || has(c.text, flat(word));
  };
}
function filtered(calls, typed) {
  const tests = typed.toLowerCase().split(/\s+/).filter(Boolean).map(matcher);
  return calls.filter((c) => tests.every((test) => test(c)));
}
