// The page runs an image through every round once. The threshold then decides here, without another request, which
// rounds were needed: an image exits after the first round whose entropy is strictly below it. Limits of a setting decide
// whether the answer of that round is given or withheld.

const STEPS = 1000; // of the slider
const MOST_TRIES = 10; // while the server is busy
const byId = (id) => document.getElementById(id);

let model = null;
let tau = 0;
let withheld = null; // the limits from which answers are withheld
let choices = 0; // images that were chosen
let rounds = []; // those that have arrived
let running = null; // AbortController of the request
let failed = false;

// Numbers as text

const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const gmacsText = (gmacs) => gmacs.toFixed(gmacs >= 10 ? 1 : gmacs >= 0.1 ? 3 : 5);
const plural = (count, word, many) => `${count.toLocaleString("en")} ${count === 1 ? word : many}`;

function probabilityText(p) {
  if (p < 0.001) return "< 0.1 %";
  if (p > 0.999) return "> 99.9 %";
  return percent(p, p < 0.0995 || p > 0.985 ? 1 : 0);
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function makeSvg(tag, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function showError(text) {
  byId("error").textContent = text.charAt(0).toUpperCase() + text.slice(1);
  byId("error").hidden = !text;
}

// What the threshold gives

/** Position of the round after which the image exits; -1 while it is not known. */
function exitRound() {
  const last = model.rounds.length - 1;
  return rounds.findIndex((round, s) => s === last || (round.entropy !== null && round.entropy < tau));
}

/** What stands for the answer of a round if it is withheld, and why; null if it is given. */
function withholding({ entropy, scores }) {
  const { entropy: limit, ood } = withheld;
  if (entropy === null) return null; // there is no answer in any case
  if (ood !== null && scores[ood.score] < ood.limit)
    return ["None of its classes", `${ood.score} ${scores[ood.score].toFixed(3)} is below ${ood.limit.toFixed(3)}`];
  if (limit !== null && entropy >= limit) return ["None", `entropy ${entropy.toFixed(3)} is not below ${limit.toFixed(3)}`];
  return null;
}

/** Average GMACs and accuracy at the threshold, interpolated between the measured ones. */
function expected() {
  const points = model.frontier.points; // thresholds in ascending order
  const above = points.findIndex((point) => point.threshold >= tau);
  if (above <= 0) return above === 0 ? points[0] : points[points.length - 1];
  const [a, b] = [points[above - 1], points[above]];
  const share = (tau - a.threshold) / (b.threshold - a.threshold);
  const between = (key) => (a[key] === null ? null : a[key] + share * (b[key] - a[key]));
  return { gmacs: between("gmacs"), top1: between("top1") };
}

function setTau(value, position) {
  tau = value;
  byId("slider").value = position ?? Math.round((STEPS * value) / model.largest_threshold);
  render();
}

// Drawing

function render() {
  const exit = exitRound();
  byId("tau").textContent = `τ = ${tau.toFixed(3)}`;
  byId("slider").setAttribute("aria-valuetext", `${tau.toFixed(3)} nats`);
  for (const button of byId("settings").children)
    button.setAttribute("aria-pressed", String(button.value === JSON.stringify([tau, withheld])));
  byId("withheld").textContent = withheldText();
  byId("withheld").hidden = !withheldText();
  model.rounds.forEach((_, s) => renderRound(s, exit));
  renderAnswer(exit);
  renderExpected();
}

function withheldText() {
  const { entropy, ood } = withheld;
  const limits = [
    ...(entropy === null ? [] : [`answers with an entropy of ${entropy.toFixed(3)} or more`]),
    ...(ood === null ? [] : [`images that score as none of the classes (${ood.score} below ${ood.limit.toFixed(3)})`]),
  ];
  return limits.length ? `Withheld: ${limits.join(", and ")}.` : "";
}

function roundState(s, exit) {
  if (exit >= 0 && s > exit) return ["not-needed", "Not needed"];
  if (s < rounds.length) {
    if (s < exit || exit < 0) return ["continues", "Continues"];
    const badge = s === model.rounds.length - 1 ? "Last round" : "Exits here";
    return withholding(rounds[s]) ? ["withheld", `${badge}, withheld`] : ["exits", badge];
  }
  if (failed) return ["failed", "Not computed"];
  return running && s === rounds.length ? ["running", "Running …"] : ["waiting", "Waiting"];
}

function renderRound(s, exit) {
  const card = byId("rounds").children[s];
  const [state, badge] = roundState(s, exit);
  card.dataset.state = state;
  card.querySelector(".badge").textContent = badge;
  card.querySelector(".track").style.setProperty("--tau", Math.min(1, tau / model.largest_threshold));
  const isLast = s === model.rounds.length - 1;
  card.querySelector(".tau-mark").hidden = isLast;
  const verdict = card.querySelector(".verdict");
  const entropy = rounds[s]?.entropy;
  if (s >= rounds.length) verdict.textContent = "";
  else if (entropy === null) verdict.textContent = "not finite";
  else if (state === "withheld") verdict.textContent = `withheld: ${withholding(rounds[s])[1]}`;
  else if (isLast) verdict.textContent = "the last round";
  else verdict.textContent = `${entropy < tau ? "below" : "not below"} τ = ${tau.toFixed(3)}`;
}

/** Fill the card of a round with what the server sent, or clear it. */
function fillRound(s, round) {
  const card = byId("rounds").children[s];
  for (const [kind, alt] of [["view", "The image as this round sees it"], ["attention", "Attention of the class token"]]) {
    const image = card.querySelector(`.${kind}`);
    image.hidden = !round;
    image.alt = round ? alt : "";
    if (round) image.src = round[kind];
    else image.removeAttribute("src");
  }
  card.querySelector(".classes").replaceChildren(...(round?.top ?? []).map(makeClass));
  card.querySelector(".entropy-value").textContent = round?.entropy?.toFixed(3) ?? "–";
  card.querySelector(".fill").style.setProperty("--share", (round?.entropy ?? 0) / model.largest_threshold);
}

function makeClass({ label, probability }) {
  const item = make("li");
  const name = make("span", "name", label);
  name.title = label;
  const bar = make("div", "bar");
  bar.append(make("div"));
  bar.firstChild.style.setProperty("--share", probability);
  item.append(name, make("span", "", probabilityText(probability)), bar);
  return item;
}

function renderAnswer(exit) {
  const answer = exit >= 0 ? rounds[exit] : null;
  const full = model.rounds.at(-1).gmacs;
  const reason = answer && withholding(answer);
  if (reason) byId("answer").textContent = `${reason[0]} (${answer.top[0].label}?)`;
  else if (answer) byId("answer").textContent = answer.top[0]?.label ?? "No answer: the logits are not finite";
  else byId("answer").textContent = running ? "Running …" : failed ? "No answer" : "No image yet";
  byId("image-exit").textContent = answer ? `round ${exit + 1} of ${model.rounds.length}` : "–";
  byId("image-gmacs").textContent = answer ? gmacsText(answer.gmacs) : "–";
  byId("image-saved").textContent = answer ? percent(1 - answer.gmacs / full) : "–";
  [...byId("cost").children].forEach((part, s) => part.classList.toggle("saved", exit < 0 || s > exit));
  if (answer?.top.length) {
    const sure = probabilityText(answer.top[0].probability);
    const after = `after ${plural(exit + 1, "round", "rounds")}`;
    byId("status").textContent = reason ? `Withheld ${after}: ${reason[1]}. The best guess has ${sure}.` : `Probability ${sure}, ${after}.`;
  }
}

function renderExpected() {
  if (!model.frontier) return;
  const point = expected();
  const full = model.rounds.at(-1).gmacs;
  byId("average-gmacs").textContent = gmacsText(point.gmacs);
  byId("average-saved").textContent = percent(1 - point.gmacs / full);
  if (point.top1 === null) return;
  byId("average-top1").textContent = percent(point.top1, 1);
  const [x, y] = place(point);
  for (const [name, value] of Object.entries({ cx: x, cy: y })) curve.marker.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: x, x2: x, y1: y, y2: BOX.bottom })) curve.guide.setAttribute(name, value);
}

// The curve

const BOX = { left: 46, right: 328, top: 20, bottom: 150 };
const curve = { marker: null, guide: null, x: [0, 1], y: [0, 1] };

function place({ gmacs, top1 }) {
  const share = (value, [low, high]) => (value - low) / (high - low || 1);
  return [
    BOX.left + share(gmacs, curve.x) * (BOX.right - BOX.left),
    BOX.bottom - share(top1, curve.y) * (BOX.bottom - BOX.top),
  ];
}

/** Three to six round numbers in a range, and the digits that they need. */
function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = power * ([5, 2].find((times) => times * power * 3 <= high - low) ?? 1);
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.floor(high / step + 1e-9) - first + 1;
  return Array.from({ length: count }, (_, number) => ({ value: (first + number) * step, digits }));
}

function drawCurve() {
  const points = model.frontier.points;
  const range = (key) => [Math.min(...points.map((p) => p[key])), Math.max(...points.map((p) => p[key]))];
  const svg = byId("curve");
  [curve.x, curve.y] = [range("gmacs"), range("top1")];
  const margin = 0.08 * (curve.y[1] - curve.y[0] || 0.01);
  curve.y = [curve.y[0] - margin, curve.y[1] + margin];
  svg.append(makeSvg("path", { class: "axis", d: `M${BOX.left} ${BOX.top}V${BOX.bottom}H${BOX.right}` }));
  for (const { value: gmacs, digits } of ticks(...curve.x)) {
    const [x] = place({ gmacs, top1: 0 });
    svg.append(makeSvg("text", { x, y: BOX.bottom + 16, "text-anchor": "middle" }, gmacs.toFixed(digits)));
  }
  for (const { value: top1, digits } of ticks(...curve.y)) {
    const [, y] = place({ gmacs: 0, top1 });
    svg.append(makeSvg("path", { class: "axis", d: `M${BOX.left} ${y}H${BOX.right}`, "stroke-dasharray": "2 4" }));
    const text = percent(top1, Math.max(0, digits - 2));
    svg.append(makeSvg("text", { x: BOX.left - 6, y: y + 4, "text-anchor": "end" }, text));
  }
  svg.append(makeSvg("text", { x: BOX.left - 6, y: 10, "text-anchor": "end" }, "top-1"));
  svg.append(makeSvg("text", { x: BOX.right, y: BOX.bottom + 34, "text-anchor": "end" }, "average GMACs per image"));
  svg.append(makeSvg("polyline", { class: "line", points: points.map((p) => place(p).join()).join(" ") }));
  curve.guide = makeSvg("line", { class: "guide" });
  curve.marker = makeSvg("circle", { class: "marker", r: 6 });
  svg.append(curve.guide, curve.marker);
  svg.removeAttribute("hidden");
}

// Running an image

/** Run a sample image, unless another image is chosen while it is loaded. */
async function runSample(name) {
  const choice = ++choices;
  try {
    const response = await fetch(`page/${name}`);
    if (!response.ok) throw new Error(await errorText(response));
    const content = await response.blob();
    if (choice === choices) run(new File([content], name, { type: content.type }));
  } catch (error) {
    showError(error instanceof TypeError ? "The server cannot be reached. Is it still running?" : error.message);
  }
}

async function run(file) {
  choices++;
  showError("");
  if (file.size > model.max_bytes) {
    showError(`The file is larger than ${Math.round(model.max_bytes / 1e6)} MB. Choose a smaller one.`);
    return;
  }
  running?.abort();
  const control = new AbortController();
  [running, rounds, failed] = [control, [], false];
  showPreview(file);
  if (matchMedia("(max-width: 800px)").matches) byId("answer").closest("section").scrollIntoView();
  model.rounds.forEach((_, s) => fillRound(s, null));
  byId("status").textContent = `Running ${file.name || "the image"}.`;
  render();
  try {
    const response = await upload(file, control.signal);
    for await (const line of readLines(response)) {
      const round = JSON.parse(line);
      if (round.error) throw new Error(round.error);
      rounds.push(round);
      fillRound(rounds.length - 1, round);
      byId("status").textContent = `Round ${rounds.length} of ${model.rounds.length} is computed.`;
      render();
    }
    if (rounds.length < model.rounds.length) throw new Error("The connection ended before the last round.");
  } catch (error) {
    if (running !== control) return; // another image was chosen
    failed = true;
    byId("status").textContent = "";
    showError(error instanceof TypeError ? "The server cannot be reached. Is it still running?" : error.message);
  } finally {
    if (running === control) {
      running = null;
      render();
    }
  }
}

/** The response; waits and tries again while the server runs another image. */
async function upload(file, signal) {
  for (let attempt = 1; ; attempt++) {
    const response = await fetch("page/rounds", {
      method: "POST",
      body: file,
      headers: { "Content-Type": file.type || "application/octet-stream" },
      signal,
    });
    if (response.ok) return response;
    if (response.status !== 429 || attempt === MOST_TRIES) throw new Error(await errorText(response));
    byId("status").textContent = "The server is busy with another image. Trying again.";
    const seconds = Number(response.headers.get("Retry-After")) || 1;
    await new Promise((resolve) => setTimeout(resolve, 1000 * Math.min(seconds, 10)));
    signal.throwIfAborted();
  }
}

async function errorText(response) {
  try {
    const { error } = await response.json();
    if (typeof error === "string") return error;
  } catch {
    // an answer without JSON, of a proxy for example
  }
  return `The server answered with an error (${response.status}).`;
}

async function* readLines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
  if (rest) yield rest;
}

function showPreview(file) {
  const preview = byId("preview");
  if (preview.src) URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(file);
  preview.alt = file.name ? `The chosen image, ${file.name}` : "The chosen image";
  preview.hidden = false;
  byId("drop").classList.add("with-image");
  byId("file-action").textContent = "Choose another image";
}

// Start

function listen() {
  byId("file").addEventListener("change", ({ target }) => {
    if (target.files.length) run(target.files[0]);
    target.value = ""; // the same file may be chosen again
  });
  const slider = byId("slider");
  slider.addEventListener("input", () => setTau((slider.value / STEPS) * model.largest_threshold, slider.value));
  byId("preview").addEventListener("error", ({ target }) => {
    target.hidden = true; // the server says what is wrong with it
  });
  addEventListener("dragover", (event) => {
    event.preventDefault();
    document.body.classList.add("dragging");
  });
  addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) document.body.classList.remove("dragging");
  });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    takeFile(event.dataTransfer);
  });
  addEventListener("paste", (event) => takeFile(event.clipboardData));
}

function takeFile(transfer) {
  if (transfer.files.length) run(transfer.files[0]);
}

function showModel() {
  const { name, classes, rounds: all, frontier, note } = model;
  byId("facts").textContent = `${name} · ${plural(classes, "class", "classes")} · ${plural(all.length, "round", "rounds")}`;
  document.title = `${name} · ProgResViT`;
  let before = 0;
  for (const { round, resolution, width, gmacs } of all) {
    const card = byId("round-template").content.firstElementChild.cloneNode(true);
    card.querySelector(".round-title").textContent = `Round ${round}`;
    card.querySelector(".round-facts").textContent =
      `${resolution} × ${resolution} pixels · ${width} channels · ${gmacsText(gmacs)} GMACs${before ? " in total" : ""}`;
    card.querySelector(".view-caption").textContent = `Input, ${resolution} × ${resolution}`;
    byId("rounds").append(card);
    const part = make("div", "saved");
    part.style.flexGrow = (100 * (gmacs - before)) / all.at(-1).gmacs; // a sum below 1 would not fill the bar
    byId("cost").append(part);
    before = gmacs;
  }
  byId("slider-end").textContent = all.length > 1 ? `${model.largest_threshold.toFixed(2)}: one round` : "";
  addSettings();
  addSamples();
  byId("frontier-note").textContent = frontier
    ? `Measured on ${frontier.data || plural(frontier.n, "image", "images")}.`
    : note;
  if (!frontier) return;
  frontier.points.sort((a, b) => a.threshold - b.threshold);
  const hasTop1 = frontier.points.every((point) => point.top1 !== null);
  byId("average").hidden = false;
  byId("average-top1-cell").hidden = !hasTop1;
  if (hasTop1) drawCurve();
}

/** A button for each setting; settings of the same threshold that withhold the same answers share one. */
function addSettings() {
  const names = new Map();
  for (const setting of [...model.settings].sort((a, b) => a.threshold - b.threshold)) {
    const key = JSON.stringify([setting.threshold, setting.withheld]);
    names.set(key, [...(names.get(key) ?? []), setting.name]);
  }
  for (const [key, sharing] of names) {
    const button = make("button", "", sharing.join(", "));
    button.type = "button";
    button.value = key;
    button.addEventListener("click", () => {
      const [threshold, limits] = JSON.parse(key);
      withheld = limits;
      setTau(threshold);
    });
    byId("settings").append(button);
  }
}

function addSamples() {
  for (const file of model.samples) {
    const name = file.replace(/\.jpg$/, "").replaceAll("_", " ");
    const button = make("button");
    button.type = "button";
    button.title = name;
    const image = make("img");
    image.src = `page/${file}`;
    image.alt = name;
    button.append(image);
    button.addEventListener("click", () => runSample(file));
    byId("samples").append(button);
  }
}

async function start() {
  try {
    const response = await fetch("page/model");
    if (!response.ok) throw new Error(await errorText(response));
    model = await response.json();
  } catch (error) {
    byId("facts").textContent = "The model is not available.";
    showError(error instanceof TypeError ? "The server cannot be reached. Load the page again." : error.message);
    byId("file").disabled = true;
    return;
  }
  showModel();
  listen();
  byId("slider").disabled = model.rounds.length < 2;
  withheld = model.withheld;
  setTau(model.threshold ?? Math.min(0.5, model.largest_threshold / 2));
  document.body.dataset.ready = "true";
}

start();
