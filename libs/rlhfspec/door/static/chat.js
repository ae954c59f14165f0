"use strict";
// A conversation with the policy. The token comes by the address or the form, and stays in this tab.

const $ = (id) => document.getElementById(id);
const SETTINGS = ["temperature", "max_tokens", "seed"];
let token = "", model = null, messages = [], stopping = null;

async function call(path, body, signal) {
  const headers = { Authorization: `Bearer ${token}`, "Content-Type": "application/json" };
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (answer.ok) return answer;
  if (answer.status === 401) throw new Error("The token is wrong.");
  const said = await answer.json().catch(() => null);
  throw new Error(said?.error?.message ?? `The server answers ${answer.status}.`);
}

// The chunks of a streamed answer.
async function* chunks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

// ---- entering ---------------------------------------------------------------------------------------------------

async function enter(given) {
  token = given;
  try {
    model = (await (await call("/v1/models")).json()).data[0];
  } catch (error) {
    $("why").textContent = error.message;
    $("why").hidden = !given;
    return show(false);
  }
  sessionStorage.setItem("token", token);
  head(model.weights_version);
  show(true);
}

function show(isIn) {
  document.body.classList.toggle("login", !isIn);
  $("enter").hidden = isIn;
  $("ask").hidden = $("anew").hidden = !isIn;
  $(isIn ? "text" : "token").focus();
}

// ---- talking ----------------------------------------------------------------------------------------------------

function add(name, text) {
  const article = $(name).content.firstElementChild.cloneNode(true);
  article.querySelector(".said").textContent = text;
  $("talk").append(article);
  article.scrollIntoView({ block: "end" });
  return article;
}

function settings() {
  const given = SETTINGS.filter((name) => $(name).value !== "");
  return Object.fromEntries(given.map((name) => [name, Number($(name).value)]));
}

async function ask(text) {
  const before = messages, said = [...before, { role: "user", content: text }];
  const asked = add("asked", text), article = add("answered", "");
  const words = article.querySelector(".said").appendChild(document.createTextNode(""));
  const versions = new Set(), began = performance.now();
  let id = "", count = 0, end = "stopped"; // or what went wrong, or "" of a whole answer
  busy(article, true);
  try {
    const body = { model: model.id, messages: said, stream: true, ...settings() };
    for await (const chunk of chunks(await call("/v1/chat/completions", body, stopping.signal))) {
      const [choice] = chunk.choices;
      id = chunk.id;
      count += choice.token_ids.length;
      for (const version of choice.weights_versions) versions.add(version);
      const follows = innerHeight + scrollY >= document.documentElement.scrollHeight - 40;
      words.appendData(choice.delta.content ?? "");
      if (count) tell(article, note(versions, choice.seed, count, performance.now() - began));
      if (follows) scrollTo(0, document.documentElement.scrollHeight);
    }
    end = "";
    offer(article, id);
  } catch (error) {
    if (error.name !== "AbortError") end = error.message;
  }
  busy(article, false);
  if (messages !== before) return; // a new chat began
  if (end && end !== "stopped") tell(article, end, true);
  else if (end) tell(article, `${article.querySelector(".told").textContent || "no token"} · stopped`);
  if (words.data || !end) messages = [...said, { role: "assistant", content: words.data }];
  else { // to be asked again
    asked.remove();
    if (end === "stopped") article.remove();
    $("text").value ||= text;
    grow();
    scrollTo(0, document.documentElement.scrollHeight);
  }
  if (versions.size) head(Math.max(...versions));
}

const tell = (article, text, isBad = false) => {
  const told = article.querySelector(".told");
  told.textContent = text;
  told.classList.toggle("bad", isBad);
};
const head = (version) => { $("model").textContent = `${model.root} · weights ${version}`; };

function note(versions, seed, count, milliseconds) {
  const speed = (count / milliseconds * 1000).toPrecision(3);
  return `weights ${[...versions].join("–")} · seed ${seed} · ${count} ${count === 1 ? "token" : "tokens"}, ${Number(speed)}/s`;
}

function busy(article, is) {
  const hadFocus = document.activeElement === $("stop");
  stopping = is ? new AbortController() : null;
  article.classList.toggle("running", is);
  $("talk").ariaBusy = is;
  $("send").hidden = is;
  $("stop").hidden = !is;
  if (hadFocus) $("text").focus();
}

// Let the visitor vote on a whole answer.
function offer(article, id) {
  const votes = article.querySelector(".votes"), buttons = [...votes.querySelectorAll("button")];
  votes.hidden = !model.takes_feedback;
  for (const button of buttons) button.addEventListener("click", async () => {
    try {
      await call("/feedback", { id, vote: button.dataset.vote });
      for (const each of buttons) each.ariaPressed = each === button;
    } catch (error) {
      tell(article, error.message, true);
    }
  });
}

function grow() {
  $("text").style.height = "auto";
  $("text").style.height = `${$("text").scrollHeight + 2}px`; // and its border
}

// ---- the visitor ------------------------------------------------------------------------------------------------

$("enter").addEventListener("submit", (event) => { event.preventDefault(); enter($("token").value.trim()); });
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || stopping) return;
  $("text").value = "";
  grow();
  ask(text);
});
$("text").addEventListener("input", grow);
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") stopping?.abort(); });
$("stop").addEventListener("click", () => stopping?.abort());
$("anew").addEventListener("click", () => {
  stopping?.abort();
  messages = [];
  $("talk").replaceChildren();
  $("text").focus();
});

function arrive() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  history.replaceState(null, "", "/"); // the token does not stay in the address
  enter(given ?? sessionStorage.getItem("token") ?? "");
}
addEventListener("hashchange", () => { if (location.hash) arrive(); });
arrive();
