"use strict";

// The page of the router: asks for one thing at a time, follows its job by server-sent events, and looks at the queues
// once a second. Everything it shows is set as text, never as HTML.

const $ = (id) => document.getElementById(id);
const HISTORY = "omniqueue.history";
const KEPT = 30;
const KINDS = ["image", "video", "audio", "text"];

let models = [];
let current = null; // the job in hand: {id, source, abort}

// -- small things ------------------------------------------------------------------------------------------------------

function element(name, text, properties = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, properties);
}

function row(...cells) {
  const made = element("tr");
  cells.forEach((cell, index) => made.append(element(index ? "td" : "th", cell)));
  return made;
}

const seconds = (value) => (value === null || value === undefined ? "" : `${value.toFixed(2)} s`);

function say(text, mood = "") {
  $("status").textContent = text;
  $("status").className = mood;
}

// A page that was opened with a key in its address may not ask by relative paths; the browser knows the key by then.
const at = (path) => location.origin + path;

async function ask(path, options = {}) {
  const response = await fetch(at(path), options);
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch { /* no JSON: the status says it */ }
  throw new Error(message);
}

// A file of this router is asked for where the page came from, whatever name a proxy gave the router.
function local(url) {
  const { pathname, href } = new URL(url, location.href);
  return pathname.startsWith("/v1/files/") ? pathname : href;
}

// -- the form ----------------------------------------------------------------------------------------------------------

function chosen() {
  return models.find((model) => model.id === $("model").value) || models[0];
}

function kindOf(model) {
  return KINDS.find((kind) => model.output_types.includes(kind)) || "image";
}

function showForm() {
  const model = chosen();
  const kind = kindOf(model);
  for (const part of document.querySelectorAll("[data-for]")) part.hidden = !part.dataset.for.split(" ").includes(kind);
  const { multiple, min_side: low, max_side: high, max_area: area, default: usual } = model.size;
  $("size").placeholder = usual;
  $("size-help").textContent = `multiples of ${multiple}, ${low} to ${high}`;
  const sides = [64, 128, 256, 512, 768, 1024, 2048].filter((side) => side % multiple === 0 && side >= low && side <= high);
  const sizes = [usual, ...sides.filter((side) => side * side <= area).map((side) => `${side}x${side}`)];
  $("sizes").replaceChildren(...[...new Set(sizes)].map((value) => element("option", undefined, { value })));
}

function fields() {
  const model = chosen();
  const kind = kindOf(model);
  const made = { model: model.id };
  const add = (name, value) => { if (value !== "" && value !== undefined) made[name] = value; };
  const prompt = $("prompt").value;
  if (kind === "text") made.messages = [{ role: "user", content: prompt }];
  else made[kind === "audio" ? "input" : "prompt"] = prompt;
  if (kind === "image" || kind === "video") {
    add("negative_prompt", $("negative").value);
    add("size", $("size").value.trim());
  }
  const seed = $("seed").value.trim();
  return { kind, body: made, seed };
}

// JSON of JavaScript's numbers would round a large seed; it is put in as it was typed.
function encoded(body, seed) {
  const text = JSON.stringify(body);
  return seed === "" ? text : `${text.slice(0, -1)},"seed":${BigInt(seed)}}`;
}

// And the other way round: a seed that a number cannot hold is kept as it was written.
function exactly(name, value, context) {
  return name === "seed" && typeof value === "number" && context?.source ? context.source : value;
}

// -- one job -----------------------------------------------------------------------------------------------------------

async function make(event) {
  event.preventDefault();
  if (current) return;
  const { kind, body, seed } = fields();
  const job = { id: null, source: null, abort: new AbortController(), kind, entry: { ...remembered(), kind } };
  current = job;
  busy(true);
  $("answer").replaceChildren();
  showStages([]);
  say("Sending …");
  try {
    await START[kind](job, body, seed);
  } catch (error) {
    if (current === job) finish(error.name === "AbortError" ? "Cancelled." : error.message, "bad");
  }
}

function remembered() {
  return { model: $("model").value, prompt: $("prompt").value, negative: $("negative").value, size: $("size").value.trim(), seed: $("seed").value.trim() };
}

const send = (job, path, body, seed) =>
  ask(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: encoded(body, seed), signal: job.abort.signal });

const START = {
  async image(job, body, seed) {
    follow(job, (await (await send(job, "/v1/jobs", body, seed)).json()).id);
  },
  async video(job, body, seed) {
    follow(job, (await (await send(job, "/v1/videos", body, seed)).json()).id.replace("video_", ""));
  },
  async audio(job, body, seed) {
    const response = await send(job, "/v1/audio/speech", { ...body, response_format: "wav", stream: true }, seed);
    follow(job, response.headers.get("X-Omniqueue-Job-Id"));
    job.sound = URL.createObjectURL(await response.blob());
    if (job.ended) showSound(job);
  },
  async text(job, body, seed) {
    const response = await send(job, "/v1/chat/completions", { ...body, stream: true }, seed);
    follow(job, response.headers.get("X-Omniqueue-Job-Id"));
    const text = $("answer").appendChild(element("pre", ""));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: {")) continue;
        for (const choice of JSON.parse(line.slice(6)).choices || []) text.textContent += choice.delta?.content || "";
      }
    }
  },
};

function follow(job, id) {
  if (current !== job) return;
  job.id = id;
  job.source = new EventSource(at(`/v1/jobs/${encodeURIComponent(id)}/events`));
  job.source.addEventListener("status", (event) => showJob(job, JSON.parse(event.data, exactly)));
  job.source.addEventListener("error", (event) => {
    const error = event.data ? JSON.parse(event.data).error : null;
    // A router that shuts down ends its streams; the browser asks the next one by itself.
    if (error && error.code !== "not_ready") finish(error.message, "bad");
    else if (current === job && job.source.readyState === EventSource.CLOSED) finish("The router closed the stream.", "bad");
    else if (current === job) say("The connection is lost; trying again …", "bad");
  });
}

function showJob(job, view) {
  if (current !== job) return;
  $("progress").value = view.progress;
  showStages(view.stages);
  if (view.status === "queued") say(view.position === null ? "Queued." : `Queued; ${view.position} ahead.`);
  else if (view.status === "running") say(running(view));
  else if (view.status === "cancelling") say("Cancelling …");
  else if (view.status === "succeeded") succeeded(job, view);
  else finish(view.error?.message || `The job ${view.status}.`, view.status === "cancelled" ? "" : "bad");
}

function running(view) {
  const now = view.stages.find((stage) => stage.stage_id === view.stage?.stage_id) || {};
  const steps = now.progress ? `, step ${now.progress.done} of ${now.progress.total}` : "";
  const queued = now.state === "queued" ? " (queued)" : "";
  return `Stage ${now.stage_id} (${now.name})${queued}${steps}, ${Math.round(view.progress * 100)} %.`;
}

function showStages(stages) {
  $("times").hidden = !stages.length;
  $("times").tBodies[0].replaceChildren(
    ...stages.map((one) => row(`${one.stage_id} ${one.name || ""}`, one.state, seconds(one.wait_s), seconds(one.run_s), String(one.attempt))),
  );
}

function succeeded(job, view) {
  const [first = {}] = view.result?.data || [];
  const took = view.finished_at - view.created_at;
  job.ended = true;
  finish(`Done in ${seconds(took)}${first.seed === undefined || first.seed === null ? "" : `, seed ${first.seed}`}.`, "good");
  (view.warnings || []).forEach((text) => $("answer").append(element("p", text)));
  if (job.kind === "text") job.entry.text = $("answer").textContent;
  else if (job.kind === "audio" && !first.url) showSound(job);
  if (first.url) {
    job.entry.url = local(first.url);
    (view.result.data || []).forEach((entry) => showFile(job.kind, local(entry.url), job.entry.prompt));
  }
  remember(job.entry);
}

function showSound(job) {
  if (job.sound && !$("answer").querySelector("audio")) showFile("audio", job.sound, job.entry.prompt);
}

function showFile(kind, src, description) {
  const made = {
    image: () => element("img", undefined, { alt: description }),
    video: () => element("video", undefined, { controls: true, loop: true, muted: true, autoplay: true }),
    audio: () => element("audio", undefined, { controls: true }),
  }[kind]();
  made.addEventListener("error", () => made.replaceWith(element("p", "This file is gone; files go with their job.")));
  made.src = src;
  made.setAttribute("aria-label", description);
  $("answer").append(made);
}

function finish(text, mood) {
  current?.source?.close();
  current = null;
  busy(false);
  say(text, mood);
}

function busy(on) {
  $("make").disabled = on;
  $("cancel").disabled = !on;
  $("progress").hidden = !on;
  $("progress").value = 0;
}

async function cancel() {
  const job = current;
  if (!job) return;
  say("Cancelling …");
  $("cancel").disabled = true;
  if (!job.id) return job.abort.abort();
  try {
    await ask(`/v1/jobs/${encodeURIComponent(job.id)}`, { method: "DELETE" });
  } catch (error) {
    if (current === job) finish(error.message, "bad");
  }
}

// -- the stages --------------------------------------------------------------------------------------------------------

async function look() {
  try {
    const [queues, ready] = await Promise.all([ask("/v1/queues"), fetch(at("/ready"))]);
    const { data } = await queues.json();
    const several = new Set(data.map((one) => one.pipeline)).size > 1;
    $("stages").tBodies[0].replaceChildren(
      ...data.map((one) => {
        const made = row(`${several ? `${one.pipeline} ` : ""}${one.stage_id} ${one.name}`, String(one.waiting), `${one.running} of ${one.capacity}`, String(one.replicas));
        made.dataset.queue = one.queue;
        if (!one.replicas) made.lastChild.className = "bad";
        return made;
      }),
    );
    const told = await ready.json();
    $("ready").textContent = told.status === "ready" ? ["Every stage has a worker.", ...told.reasons].join(" ") : told.reasons.join(" ");
    $("ready").className = told.status === "ready" ? "good" : "bad";
  } catch (error) {
    $("ready").textContent = `The router does not answer: ${error.message}`;
    $("ready").className = "bad";
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

// -- history -----------------------------------------------------------------------------------------------------------

// What is kept may be of another version or by another hand: what is no entry must not keep the page from starting.
function history() {
  try {
    const found = JSON.parse(localStorage.getItem(HISTORY));
    return Array.isArray(found) ? found.filter((entry) => typeof entry?.prompt === "string" && KINDS.includes(entry.kind)) : [];
  } catch {
    return [];
  }
}

function remember(entry) {
  try {
    localStorage.setItem(HISTORY, JSON.stringify([{ ...entry, at: Date.now() }, ...history()].slice(0, KEPT)));
  } catch { /* a browser that keeps nothing */ }
  showHistory();
}

function showHistory() {
  const entries = history();
  $("forget").hidden = !entries.length;
  $("history").replaceChildren(
    ...entries.map((entry) => {
      const item = element("li");
      const button = element("button", `${entry.prompt} (${[entry.model, entry.size, entry.seed].filter(Boolean).join(", ")})`, { type: "button" });
      button.title = new Date(entry.at).toLocaleString();
      button.addEventListener("click", () => restore(entry));
      item.append(button);
      return item;
    }),
  );
}

function restore(entry) {
  if (models.some((model) => model.id === entry.model)) $("model").value = entry.model;
  showForm();
  for (const name of ["prompt", "negative", "size", "seed"]) $(name).value = entry[name] || "";
  $("prompt").focus();
  if (current) return;
  $("answer").replaceChildren();
  showStages([]);
  say("From the history.");
  if (entry.url) showFile(entry.kind, entry.url, entry.prompt);
  else if (entry.text) $("answer").append(element("pre", entry.text));
}

// -- start -------------------------------------------------------------------------------------------------------------

async function start() {
  $("ask").addEventListener("submit", make);
  $("cancel").addEventListener("click", cancel);
  $("model").addEventListener("change", showForm);
  $("forget").addEventListener("click", () => { localStorage.removeItem(HISTORY); showHistory(); });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
    else if (event.key === "Escape" && current) cancel();
  });
  showHistory();
  look();
  try {
    models = (await (await ask("/v1/models")).json()).data;
    $("model").replaceChildren(...models.map((model) => element("option", model.id, { value: model.id })));
    showForm();
  } catch (error) {
    say(error.message, "bad");
  }
}

start();
