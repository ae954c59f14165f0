"use strict";
// The page: a list of jobs, one job, one sample. One stream of events for each; what comes over it is only ever text.

const main = document.getElementById("main"), link = document.getElementById("link"), where = document.getElementById("where");
let page = null; // {close()}: what is shown now

const age = (from, to = Date.now() / 1000) => from ? duration(Math.max(to - from, 0)) : "–";
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${number(seconds)} s`;
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days}d ${hours % 24}h`;
  return hours ? `${hours}h ${minutes % 60}m` : `${minutes}m ${Math.floor(seconds % 60)}s`;
}
const clock = (unix) => unix ? new Date(unix * 1000).toLocaleTimeString("en-GB") : "–";
const bytes = (count) => count >= 1e6 ? `${number(count / 1e6)} MB` : count >= 1e3 ? `${number(count / 1e3)} kB` : `${count} B`;
const href = (...parts) => "#/" + parts.map(encodeURIComponent).join("/");
const api = (job, rest) => `/api/jobs/${encodeURIComponent(job[0])}/${encodeURIComponent(job[1])}/${rest}`;
const pill = (phase) => h("span", { class: `pill p-${phase.toLowerCase().replace(/[^a-z]/g, "")}` }, phase);
const text = (element, value) => { if (element.textContent !== value) element.textContent = value; };

function progress(step, total) {
  const part = total ? Math.min(step / total, 1) : 0;
  const fill = h("span", { class: "fill" });
  fill.style.width = `${part * 100}%`;
  return h("span", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": step, "aria-label": "steps" }, fill);
}

function table(caption, heads, rows, kind = "") {
  const cells = (row) => row.map((cell, place) => h("td", { "data-label": heads[place], class: typeof cell === "string" && /^[-–\d.,%+e]+( ?[a-zA-Z]{1,2})?$/.test(cell) ? "num" : null }, cell));
  return h("div", { class: "scroll" }, h("table", { class: kind }, h("caption", {}, caption),
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...cells(row))))));
}

const section = (title, id, ...rest) => h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...rest);

// ---- the stream -------------------------------------------------------------------------------------------------

function listen(url, handlers) {
  let source = null, again = 0;
  const open = () => {
    source = new EventSource(url);
    source.onopen = () => say("live", "live");
    source.onerror = async () => {
      say("reconnecting", "away");
      if (source.readyState !== EventSource.CLOSED) return; // it comes back by itself
      const answer = await fetch(url).catch(() => null); // an EventSource does not say why it was refused
      if (answer && answer.status === 401) return location.assign("/login");
      if (answer && answer.ok) answer.body.cancel();
      else if (answer) say((await answer.text()).trim(), "away");
      again = setTimeout(open, answer && !answer.ok ? 10000 : 2000);
    };
    for (const [name, handle] of Object.entries(handlers)) source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  };
  open();
  return () => { clearTimeout(again); source.close(); };
}

function say(words, kind) { text(link, words); link.className = kind; }

async function ask(url) {
  const answer = await fetch(url).catch(() => null);
  if (answer && answer.status === 401) location.assign("/login");
  if (!answer || !answer.ok) throw new Error(answer ? (await answer.text()).trim() : "the dashboard does not answer");
  return answer.json();
}

// ---- jobs -------------------------------------------------------------------------------------------------------

function jobsPage() {
  let jobs = [], problem = "";
  const search = h("input", { type: "search", placeholder: "Filter by name, namespace or phase", "aria-label": "Filter jobs" });
  const list = h("div", {}), note = h("p", { class: "note", role: "alert", hidden: true });
  search.addEventListener("input", show);
  main.replaceChildren(h("div", { class: "title" }, h("h1", {}, "Jobs"), search), note, list);
  function row(job) {
    return [pill(job.phase), h("a", { href: href(job.namespace, job.name) }, job.name), job.namespace,
      h("span", { class: "steps" }, progress(job.step, job.total_steps), ` ${job.step}/${job.total_steps || "?"}`),
      number(job.reward), number(job.kl), number(job.tokens_per_second), number(job.accepted_per_verification),
      String(job.generators), String(job.gpus || "–"), job.eta_seconds ? duration(job.eta_seconds) : "–", age(job.created), h("span", { class: "why" }, job.message)];
  }
  function show() {
    const words = search.value.toLowerCase().split(/\s+/);
    const found = jobs.filter((job) => words.every((word) => `${job.namespace}/${job.name} ${job.phase}`.toLowerCase().includes(word)));
    note.hidden = !problem; text(note, problem);
    const heads = ["Phase", "Job", "Namespace", "Step", "Reward", "KL", "Tokens/s", "Accepted", "Generators", "GPUs", "ETA", "Age", "Message"];
    const focused = document.activeElement?.getAttribute("href");
    list.replaceChildren(found.length ? table(`${found.length} of ${jobs.length} jobs`, heads, found.map(row), "jobs cards")
      : h("p", { class: "quiet" }, jobs.length ? "No job matches." : "No jobs, or none that you are allowed to see."));
    if (focused) [...list.querySelectorAll("a")].find((each) => each.getAttribute("href") === focused)?.focus({ preventScroll: true });
  }
  const close = listen("/api/events", { whole: () => {}, jobs: (data) => { jobs = data; show(); }, problem: (data) => { problem = data; show(); } });
  return { close };
}

// ---- one job ----------------------------------------------------------------------------------------------------

const ROUNDING = 1e-6; // the loss of one update a step is 0 up to it
const CHARTS = [ // title, curves, unit of the vertical axis
  ["Reward", [{ key: "reward", label: "mean" }], "mean reward of a sample"],
  ["KL to the reference", [{ key: "kl", label: "k3" }], "nats per token"],
  ["Entropy", [{ key: "entropy", label: "entropy" }], "nats per token"],
  ["Groups of equal rewards", [{ key: "equal_groups", label: "groups" }], "groups"],
  ["Distinct responses", [{ key: "distinct", label: "distinct" }], "distinct responses per prompt"],
  ["Loss", [{ key: "policy_loss", label: "policy" }, { key: "value_loss", label: "value" }], "loss"], // hidden where it is 0 throughout
  ["Tokens per second", [{ key: "tokens_per_second", label: "tokens/s" }], "tokens/s"],
  ["Accepted per verification", [{ key: "accepted", label: "accepted" }], "drafted tokens per verification"],
  ["Response length", [{ key: "length_p95", label: "p95" }, { key: "length_mean", label: "mean" }, { key: "length_p50", label: "p50" }], "tokens"],
];

function jobPage(job) {
  const state = { columns: [], rows: new Map(), job: null, words: {} };
  const head = h("div", { class: "head" }), links = h("p", { class: "links quiet" }), note = h("div", { role: "alert" });
  const charts = CHARTS.map((each) => new Chart(...each));
  const generators = new Generators(), moves = new Moves(generators), workers = h("div", {}), conditions = h("div", {});
  const samples = samplesPart(job);
  main.replaceChildren(head, links, note,
    section("Curves", "curves", h("div", { class: "charts" }, ...charts.map((chart) => chart.element))),
    section("Generators", "generators", generators.element, moves.element),
    section("Conditions", "conditions", conditions),
    section("Processes", "processes", workers),
    section("Samples", "samples", samples.element));
  const drawCharts = () => {
    const rows = [...state.rows.values()].sort((one, other) => one[0] - other[0]);
    for (const chart of charts) {
      chart.update(state.columns, rows);
      if (chart.title === "Loss") chart.element.hidden = chart.rows.length > 0 && chart.extent().every((value) => Math.abs(value) <= ROUNDING);
    }
    if (rows.length) samples.newest(rows[rows.length - 1][0]);
  };
  const close = listen(api(job, "events"), {
    whole: (data) => {
      state.columns = data.columns;
      state.rows = new Map(data.rows.map((row) => [row[0], row]));
      moves.all(data.moves);
      drawCharts();
    },
    steps: (rows) => { for (const row of rows) state.rows.set(row[0], row); drawCharts(); },
    moves: (data) => moves.add(data),
    samples: (data) => samples.recent(data),
    last_words: (data) => {
      state.words = data;
      if (state.job) conditions.replaceChildren(...conditionsPart(state.job, data));
    },
    job: (data) => {
      state.job = data;
      jobHead(head, data);
      jobLinks(links, job, data.folder);
      note.replaceChildren(...[data.warning, ...data.problems].filter(Boolean).map((problem) => h("p", { class: "note" }, problem)));
      conditions.replaceChildren(...conditionsPart(data, state.words));
    },
    now: (data) => {
      generators.update(data.generators);
      workers.replaceChildren(workersPart(data.workers));
    },
  });
  return { close: () => { close(); charts.forEach((chart) => chart.close()); } };
}

// Made anew only when it is another folder: a link that goes while one presses it is no link.
function jobLinks(element, job, folder) {
  const said = JSON.stringify(folder);
  if (element.dataset.said === said) return;
  element.dataset.said = said;
  element.replaceChildren(h("a", { href: api(job, "yaml"), target: "_blank", rel: "noopener" }, "YAML of the job"),
    ...(folder.path ? [" · run folder ", h("code", {}, folder.path), ` ${folder.fetch ? "in" : "on"} ${folder.place}`] : []),
    ...(folder.fetch ? [" · ", h("code", {}, folder.fetch)] : []));
}

function jobHead(element, { head, run, is_live }) {
  const tile = (name, value) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value));
  element.replaceChildren(...[
    h("div", { class: "title" }, h("h1", {}, head.name), pill(head.phase), h("span", { class: "quiet" }, `${head.namespace} · ${head.algorithm || "?"} · ${head.model}${run ? ` · run ${run}` : ""}${is_live ? "" : " · not live"}`)),
    head.message ? h("p", { class: "why" }, head.message) : null,
    h("div", { class: "bar" }, progress(head.step, head.total_steps), h("span", {}, `step ${head.step} of ${head.total_steps || "?"}`)),
    h("dl", { class: "tiles" }, tile("Reward", number(head.reward)), tile("KL", number(head.kl)), tile("Tokens/s", number(head.tokens_per_second)),
      tile("Accepted", number(head.accepted_per_verification)), tile(head.ended ? "Took" : "Running for", age(head.started, head.ended || undefined)),
      tile("ETA", head.eta_seconds && !head.ended ? duration(head.eta_seconds) : "–"), tile("Generators", String(head.generators)), tile("Restarts", String(head.restarts)))].filter(Boolean));
}

function conditionsPart({ conditions, pods }, words) {
  const found = [];
  if (conditions.length) found.push(table("Conditions", ["Type", "Status", "Reason", "Since", "Message"],
    conditions.map((each) => [each.type, each.status, each.reason || "–", each.since ? `${age(each.since)} ago` : "–", h("span", { class: "why" }, each.message)]), "cards"));
  if (pods.length) found.push(table("Pods", ["Pod", "Role", "Phase", "Ready", "Node", "Restarts", "Age", "Message"],
    pods.map((each) => [each.name, each.role, pill(each.phase), each.ready ? "yes" : "no", each.node || "–", String(each.restarts), age(each.since),
      h("span", { class: "why" }, each.message, words[each.name] ? h("span", { class: "words" }, ` ${words[each.name]}`) : null)]), "cards"));
  return found.length ? found : [h("p", { class: "quiet" }, "No conditions or pods are known.")];
}

function workersPart(workers) {
  if (!workers.length) return h("p", { class: "quiet" }, "No process is reporting now.");
  return table("Current activity of each process", ["Process", "State", "Activity", "For", "Busy", "Host"], workers.map((each) => [
    `${each.stage} ${each.worker}`, h("span", { class: `does d-${each.doing}` }, each.doing), h("span", { class: "why" }, each.what),
    duration(each.seconds), duration(each.busy), each.pid ? `${each.host}:${each.pid}` : "–"]), "cards");
}

// Generators: a row each, or tiles where there are many. Moves fly as arcs beside the rows.
const MANY = 24, SHOWN_SECONDS = 6;

class Generators {
  constructor() {
    this.body = h("div", {});
    this.arcs = h("svg", { class: "arcs", width: 44, "aria-hidden": "true" });
    this.element = h("div", { class: "generators" }, this.body);
    this.rows = new Map(); this.history = new Map(); this.moving = [];
  }

  update(loads) {
    for (const load of loads) {
      const past = this.history.get(load.worker) || [];
      past.push(load.tokens_per_second || 0);
      this.history.set(load.worker, past.slice(-60));
    }
    if (!loads.length) { this.rows.clear(); this.body.replaceChildren(h("p", { class: "quiet" }, "No generator is reporting now.")); return; }
    this.most = Math.max(1, ...loads.map((load) => load.running + load.waiting));
    this.fastest = Math.max(1, ...loads.map((load) => load.tokens_per_second || 0));
    const key = loads.map((load) => load.worker).join() + (loads.length > MANY);
    if (key !== this.key || !this.rows.size) { this.key = key; this.build(loads); }
    for (const load of loads) this.fill(this.rows.get(load.worker), load);
    const sum = (name) => loads.reduce((total, load) => total + (load[name] || 0), 0);
    text(this.body.querySelector(".total"), `${loads.length} generator${loads.length === 1 ? "" : "s"}: ${number(sum("running"))} samples running, ${number(sum("waiting"))} waiting, ${number(sum("tokens_per_second"))} tokens/s`);
  }

  build(loads) {
    this.rows.clear();
    this.many = loads.length > MANY;
    if (this.many) {
      this.body.replaceChildren(h("p", { class: "quiet total" }), h("ul", { class: "cells" }, ...loads.map((load) => {
        const row = { cells: null, element: h("li", { tabindex: "0" }, String(load.worker)) };
        this.rows.set(load.worker, row);
        return row.element;
      })));
      return;
    }
    const heads = ["", "Generator", "Samples", "Tokens/s", "", "Strategy", "Accepted", "Weights", "State"];
    const shown = table("", heads, loads.map(() => heads.map(() => "")), "loads");
    shown.querySelector("caption").className = "total";
    for (const row of shown.querySelectorAll("tr")) [...row.children].forEach((cell, place) => cell.classList.add(`k${place}`));
    shown.querySelectorAll("tbody tr").forEach((element, place) => this.rows.set(loads[place].worker, { element, cells: [...element.children] }));
    const first = shown.querySelector("tbody td");
    first.rowSpan = loads.length; first.classList.add("gutter"); first.append(this.arcs);
    shown.querySelectorAll("tbody tr").forEach((element, place) => { if (place) element.firstElementChild.remove(); });
    for (const row of this.rows.values()) row.cells.shift();
    this.body.replaceChildren(shown);
  }

  fill(row, load) {
    const state = load.silent ? "silent" : load.leaving ? "leaving" : load.running ? "working" : "waiting";
    if (this.many) {
      row.element.style.setProperty("--heat", (load.tokens_per_second || 0) / this.fastest);
      row.element.className = `c-${state}`;
      row.element.title = `generator ${load.worker} on ${load.host}: ${load.running}+${load.waiting} samples, ${number(load.tokens_per_second)} tokens/s, ${load.strategy}, ${state}`;
      row.element.setAttribute("aria-label", row.element.title);
      return;
    }
    const [name, samples, speed, past, strategy, accepted, version, doing] = row.cells;
    text(name, `${load.worker}`); name.title = load.host;
    if (!samples.children.length) samples.replaceChildren(h("span", { class: "load" }, h("i", { class: "run" }), h("i", { class: "wait" })), h("span", { class: "amount" }));
    samples.firstChild.children[0].style.width = `${(load.running / this.most) * 100}%`;
    samples.firstChild.children[1].style.width = `${(load.waiting / this.most) * 100}%`;
    text(samples.lastChild, load.waiting ? `${load.running}+${load.waiting}` : `${load.running}`);
    text(speed, number(load.tokens_per_second));
    past.replaceChildren(sparkline(this.history.get(load.worker)));
    text(strategy, load.strategy || "–"); text(accepted, number(load.accepted));
    text(version, `v${load.version}`); if (!doing.children.length) doing.replaceChildren(h("span"));
    text(doing.firstElementChild, state); doing.firstElementChild.className = `does d-${state}`;
  }

  move(move) {
    const source = this.rows.get(move.source), target = this.rows.get(move.destination);
    if (!source || !target) return;
    const went = move.how === "kv" || move.how === "tokens";
    if (this.many) {
      for (const [row, kind] of [[source, "from"], [target, "to"]]) { row.element.classList.add(kind); setTimeout(() => row.element.classList.remove(kind), SHOWN_SECONDS * 1000); }
      return;
    }
    const top = this.arcs.closest("tbody").getBoundingClientRect();
    const middle = (row) => { const box = row.element.getBoundingClientRect(); return box.top - top.top + box.height / 2; };
    const [from, to] = [middle(source), middle(target)];
    this.arcs.setAttribute("height", top.height);
    const arc = h("g", { class: `arc ${went ? "" : "kept"}` }, h("path", { d: `M40 ${from} C 4 ${from}, 4 ${to}, 36 ${to}` }), h("path", { class: "tip", d: `M33 ${to - 4} L40 ${to} L33 ${to + 4}` }));
    this.arcs.append(arc);
    setTimeout(() => arc.remove(), SHOWN_SECONDS * 1000);
  }
}

class Moves {
  constructor(generators) {
    this.generators = generators; this.list = [];
    this.element = h("div", { class: "moves" });
    this.show();
  }
  all(moves) { this.list = moves.slice(); this.show(); }
  add(moves) { this.list.push(...moves); this.list = this.list.slice(-200); moves.slice(-20).forEach((move) => this.generators.move(move)); this.show(); }
  show() {
    if (!this.list.length) { this.element.replaceChildren(h("p", { class: "quiet" }, "No sample has moved.")); return; }
    const count = (how) => this.list.filter((move) => move.how === how).length;
    const words = { kv: "with its KV", tokens: "tokens only", kept: "stayed", lost: "lost" };
    this.element.replaceChildren(table(
      `Last moves: ${count("kv")} with their KV, ${count("tokens")} with tokens only, ${count("kept")} stayed where they were`,
      ["At", "Sample", "From", "To", "How", "Sent", "Pause", "Recomputed", "Reason"],
      this.list.slice(-10).reverse().map((move) => [clock(move.at), move.sample_id, String(move.source), String(move.destination),
        h("span", { class: `how h-${move.how}` }, words[move.how] || move.how), bytes(move.num_bytes), duration(move.pause_seconds), String(move.num_recomputed), h("span", { class: "why" }, move.how === "kv" ? "" : move.reason)]), "moved"));
  }
}

// ---- samples ----------------------------------------------------------------------------------------------------

function samplesPart(job) {
  const choice = h("select", { "aria-label": "Step" }), list = h("div", {}), live = h("div", {}), more = h("button", { type: "button", hidden: true }, "More");
  const tools = h("div", { class: "tools", hidden: true }, h("label", {}, "Samples of ", choice), more);
  let steps = [], shown = null, skip = 0, asked = 0;
  const row = (each) => [h("a", { href: href(job[0], job[1], each.id) }, each.id.split("/").slice(1).join("/")), h("span", { class: "sample" }, each.prompt), h("span", { class: "sample" }, each.text),
    number(each.reward), String(each.num_tokens), each.error || each.finish_reason];
  async function load(step, from) {
    const mine = ++asked;
    try {
      const found = await ask(api(job, `samples?step=${step}&skip=${from}`));
      if (mine !== asked) return;
      skip = from; shown = step;
      const of = steps.find((each) => each[0] === step)?.[1] || found.length;
      more.hidden = skip + found.length >= of;
      list.replaceChildren(table(`Samples ${skip + 1} to ${skip + found.length} of ${of} of step ${step}`, ["Sample", "Prompt", "Response", "Reward", "Tokens", "End"], found.map(row), "cards samples"));
    } catch (error) { list.replaceChildren(h("p", { class: "quiet" }, error.message)); more.hidden = true; }
  }
  choice.addEventListener("change", () => load(Number(choice.value), 0));
  more.addEventListener("click", () => load(shown, skip + 25));
  let known = -1;
  async function newest(step) {
    if (step === known) return;
    const follow = shown === null || shown === known;
    known = step;
    try { steps = await ask(api(job, "samples")); } catch (error) { list.replaceChildren(h("p", { class: "quiet" }, error.message)); return; }
    tools.hidden = !steps.length;
    choice.replaceChildren(...steps.map(([each, count]) => h("option", { value: each }, `step ${each} (${count})`)));
    if (steps.length && follow) load(steps[0][0], 0);
    else if (shown !== null) choice.value = shown;
  }
  function recent(heads) {
    live.replaceChildren(table("Finished just now", ["Sample", "Prompt", "Response"], heads.slice(-5).reverse().map((each) =>
      [h("a", { href: href(job[0], job[1], each.id) }, each.id.split("/").slice(1).join("/")), h("span", { class: "sample" }, each.prompt), h("span", { class: "sample" }, each.text)]), "cards samples"));
  }
  return { element: h("div", {}, live, tools, list), newest, recent };
}

function samplePage(job, id) {
  main.replaceChildren(h("p", { class: "quiet" }, "Loading"));
  say("", "");
  let open = true, again = 0;
  const load = async () => {
    try {
      const found = await ask(api(job, `sample?id=${encodeURIComponent(id)}`));
      if (open) main.replaceChildren(...sampleParts(job, found));
      if (open && !found.sample) again = setTimeout(load, 2000); // it is on its way
    } catch (error) { if (open) main.replaceChildren(h("h1", {}, "Sample"), h("p", { class: "note" }, error.message)); }
  };
  load();
  return { close: () => { open = false; clearTimeout(again); } };
}

function sampleParts(job, { id, owner, sample, trace, missing }) {
  const facts = sample ? [["Reward", number(sample.reward)], ...Object.entries(sample.components).map(([name, value]) => [name, number(value)]),
    ["Tokens", String(sample.num_tokens)], ["End", sample.finish_reason], ["Weights", `v${sample.weights_version}`], ["Step", String(sample.step)]] : [];
  return [h("div", { class: "title" }, h("h1", {}, id), h("a", { href: href(...job) }, `back to ${job[1]}`)),
    owner ? h("p", { class: "note calm" }, `${owner} is generating it now`) : null,
    facts.length ? h("dl", { class: "tiles" }, ...facts.map(([name, value]) => h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value)))) : null,
    sample?.error ? h("p", { class: "note" }, sample.error) : null,
    sample ? section("Text", "text", h("div", { class: "card texts" }, h("h3", {}, "Prompt"), h("pre", { tabindex: "0" }, sample.prompt), h("h3", {}, "Response"), h("pre", { tabindex: "0" }, sample.text))) : null,
    trace ? section("Where its time went", "trace", waterfall(trace)) : null,
    ...missing.map((each) => h("p", { class: "quiet" }, each))].filter(Boolean);
}

function waterfall(trace) {
  const kinds = { "·": "queue", "█": "work", "░": "others", "─": "still", "×": "vain" };
  const seen = new Set(trace.spans.flatMap((span) => span.pieces.map((piece) => piece[0])));
  const told = (mark, what) => [h("i", { class: `piece ${kinds[mark]}` }), what];
  const rows = trace.spans.map((span) => {
    const track = h("div", { class: "track" });
    for (const [mark, from, to] of span.pieces) {
      const piece = h("span", { class: `piece ${kinds[mark]}` });
      piece.style.left = `${(from / trace.seconds) * 100}%`;
      piece.style.width = `max(2px, ${((to - from) / trace.seconds) * 100}%)`;
      track.append(piece);
    }
    const from = Math.min(...span.pieces.map((piece) => piece[1])), to = Math.max(...span.pieces.map((piece) => piece[2]));
    return h("tr", {}, h("th", { scope: "row" }, span.name), h("td", { "data-label": "by" }, span.by), h("td", { class: "num", "data-label": "from" }, duration(from)), h("td", { class: "num", "data-label": "for" }, duration(to - from)),
      h("td", { class: "wide" }, track, h("div", { class: "quiet" }, span.notes.join(" · "))));
  });
  return h("div", { class: "card scroll" }, h("table", { class: "waterfall" },
    h("caption", {}, `${duration(trace.seconds)} from its prompt to its training`),
    h("thead", {}, h("tr", {}, ...["", "by", "from", "for", ""].map((head) => h("th", { scope: "col" }, head)))), h("tbody", {}, ...rows)),
    h("p", { class: "legend" }, ...told("·", "waits in a queue"), ...told("█", "in progress"), ...told("░", "waits for scores and for the rest of its step"),
      ...(seen.has("─") ? told("─", "paused while it moves") : []), ...(seen.has("×") ? told("×", "in vain: it was generated again") : [])),
    h("p", { class: "quiet" }, `trace ${trace.trace}`));
}

// ---- routes -----------------------------------------------------------------------------------------------------

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  page?.close();
  const [namespace, name, sample] = parts, job = [namespace, name];
  const crumbs = [h("a", { href: "#/" }, "Jobs")];
  if (name) crumbs.push(" / ", h("a", { href: href(...job) }, name));
  if (sample) crumbs.push(" / ", h("span", { "aria-current": "page" }, sample.split("/").slice(1).join("/")));
  where.replaceChildren(...crumbs);
  document.title = `${sample || name || "Jobs"} · RLHFSpec`;
  page = sample ? samplePage(job, sample) : name ? jobPage(job) : jobsPage();
}

document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
window.addEventListener("hashchange", () => { route(); main.focus({ preventScroll: true }); window.scrollTo(0, 0); });
route();
