// The live page of a router: asks for /router/status every second. What it shows is text, never markup.
"use strict";

const KEY = "quire-router-key";
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEY) || "";
let shownLife = "";

function made(tag, text, kind) {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function cell(row, text, kind) {
  const one = made("td", text, kind);
  row.append(one);
  return one;
}

function duration(seconds) {
  return seconds < 1 ? `${(1000 * seconds).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

async function ask(path) { // relative to the page: a proxy may put all of it below a path
  const answer = await fetch(path.slice(1), { headers: key ? { authorization: `Bearer ${key}` } : {} });
  byId("login").hidden = answer.status !== 401 && answer.status !== 403;
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error.message);
  return found;
}

// -- servers and their caches ---------------------------------------------------------------------------------------

function showServers(servers) {
  const body = byId("servers");
  body.replaceChildren();
  for (const one of servers) {
    const row = body.insertRow();
    cell(row, one.server);
    cell(row, one.role);
    const again = one.retry_in_s === null ? "" : `, next check in ${one.retry_in_s} s`;
    cell(row, one.reason ? `${one.state}: ${one.reason}${again}` : one.state, one.state);
    for (const name of ["waiting", "running", "other_requests", "queued_tokens", "prefill_tokens_per_second", "requests",
      "failures"]) cell(row, one[name].toLocaleString("en"), "n");
  }
}

function showCaches(servers) {
  const body = byId("caches");
  body.replaceChildren();
  for (const one of servers) {
    const row = body.insertRow(), kv = one.kv;
    cell(row, one.server);
    cell(row, kv.num_blocks
      ? `${kv.held_blocks} in use, ${kv.cached_blocks} cached, of ${kv.num_blocks}` : "not reported").style.whiteSpace = "nowrap";
    cell(row, kv.prompt_tokens ? `${(100 * kv.cached_tokens / kv.prompt_tokens).toFixed(1)} %` : "", "n");
    cell(row, `${(one.known_chunks * 128 / 1024).toFixed(1)} KiB`, "n");
    const tiers = Object.entries(kv.kv_tiers || {}).map(([tier, counts]) =>
      `${tier} ${Object.entries(counts).map(([event, blocks]) => `${blocks} ${event}`).join(", ")}`);
    cell(row, tiers.join("; ") || "none", "small");
  }
}

function showMap(prompts, servers) {
  byId("no-prompts").hidden = prompts.length > 0;
  const names = servers.map((one) => one.server);
  const [head] = byId("map").tHead.rows.length ? byId("map").tHead.rows : [byId("map").tHead.insertRow()];
  head.replaceChildren(...["beginning", "tokens", "requests", "hits"].map((text, at) => made("th", text, at && "n")),
    ...names.map((name) => made("th", name)));
  byId("map").tHead.hidden = !prompts.length;
  const body = byId("map").tBodies[0];
  body.replaceChildren();
  for (const one of prompts) {
    const row = body.insertRow();
    cell(row, one.request, "small");
    for (const name of ["prompt_tokens", "requests", "hits"]) cell(row, one[name], "n");
    for (const name of names) {
      const share = Math.min(1, (one.held[name] || 0) / Math.max(1, one.prompt_tokens));
      const bar = made("span", share ? `${Math.round(100 * share)} %` : "–", "bar");
      bar.style.backgroundSize = `${100 * share}% 100%`;
      cell(row, "", "held").append(bar);
    }
  }
}

// -- requests -------------------------------------------------------------------------------------------------------

function showCost(cost) {
  const others = cost.others_s ? ` + others ${duration(cost.others_s)}` : "";
  const fetch = cost.fetch_s ? ` + fetch ${duration(cost.fetch_s)}` : "";
  return `${cost.server} ${duration(cost.total_s)} = compute ${duration(cost.compute_s)}${others}${fetch}`
    + ` + queue ${duration(cost.queue_s)}, ${cost.held} cached`;
}

function showRequests(requests) {
  byId("no-requests").hidden = requests.length > 0;
  const body = byId("requests"), focused = body.contains(document.activeElement) && document.activeElement.dataset.request;
  body.replaceChildren();
  for (const one of requests) {
    const row = body.insertRow();
    cell(row, one.seconds_ago, "n");
    const open = made("button", one.request + (one.resumed ? " (goes on)" : ""), "open");
    open.addEventListener("click", () => { shownLife = one.request; showLife(); });
    open.dataset.request = one.request;
    cell(row, "", "small").append(open);
    if (focused === one.request) open.focus();
    cell(row, one.prompt_tokens, "n");
    cell(row, one.prefill ? `${one.server}, prompt at ${one.prefill}` : one.server, "chosen");
    cell(row, one.first_s === null ? "" : duration(one.first_s), "n");
    cell(row, one.lost ? "lost" : one.total_s === null ? "running" : duration(one.total_s), one.lost ? "n down" : "n");
    const costs = cell(row, "", "small");
    for (const cost of one.costs) costs.append(made("div", showCost(cost), cost.server === one.server ? "chosen" : ""));
  }
}

// -- a request's life -------------------------------------------------------------------------------------------------

// The spans of a stay at a server: [kind, what, begin, end], in seconds since the request came to the router.
function spansOf(stay, before) {
  const spans = [["router", `router, to ${stay.server}`, before, stay.sent]];
  for (const one of stay.choices) {
    const of = stay.choices.length > 1 ? ` of choice ${one.choice}` : "";
    const queued = stay.sent + one.queue_seconds;
    const first = one.ttft_seconds === null ? stay.sent + one.total_seconds : stay.sent + one.ttft_seconds;
    spans.push(["queue", `queue${of} at ${stay.server}`, stay.sent, queued]);
    for (const fetch of one.fetches) spans.push(...fetched(fetch, stay, one));
    spans.push(["prefill", `prefill${of}, ${one.prompt - one.cached} of ${one.prompt} tokens`, queued, first]);
    const output = `decode${of}, ${one.output} tokens` + (one.preemptions ? `, preempted ${one.preemptions} times` : "");
    if (one.ttft_seconds !== null) spans.push(["decode", output, first, stay.sent + one.total_seconds]);
  }
  if (!stay.choices.length) spans.push(["decode", `at ${stay.server}, which reports no details`, stay.sent, stay.ended]);
  if (stay.lost) spans.push(["router", `lost: ${stay.lost}`, stay.ended, stay.ended]);
  return spans;
}

function fetched(fetch, stay, one) {
  const begin = stay.sent + fetch.begin - one.arrived, seconds = fetch.seconds ?? 0, end = begin + seconds;
  if (fetch.source !== "peer") return [["transfer", `${fetch.tokens} tokens from ${fetch.source}`, begin, end]];
  const moved = end - fetch.moving;
  return [["prefill", `prefill at ${stay.prefill ?? "another engine"}, ${fetch.tokens} tokens`, begin, moved],
    ["transfer", `transfer of its blocks (total)`, moved, end]];
}

function showSpan([kind, what, begin, end], total) {
  const line = made("div", "", `span ${kind}`), track = made("span", "", "track"), bar = made("i", "");
  bar.style.left = `${Math.min(99.5, 100 * begin / total)}%`;
  bar.style.width = `${Math.max(0, Math.min(100, 100 * (end - begin) / total))}%`;
  track.append(bar);
  line.append(made("span", what, "what small"), track, made("span", duration(Math.max(0, end - begin)), "time small"));
  return line;
}

async function showLife() {
  const wanted = shownLife, box = byId("life");
  try {
    const life = await ask(`/router/requests/${encodeURIComponent(wanted)}`);
    if (wanted !== shownLife) return;
    let before = 0;
    const spans = life.stays.flatMap((stay) => {
      const found = spansOf(stay, before);
      before = stay.ended;
      return found;
    });
    const total = Math.max(1e-6, ...spans.map((span) => span[3]));
    box.replaceChildren(made("h3", `${life.request}: ${duration(total)}`), ...spans.map((span) => showSpan(span, total)));
  } catch (error) {
    box.replaceChildren(made("p", error.message, "down"));
  }
  box.hidden = false;
}

async function look() {
  try {
    const found = await ask("/router/status");
    byId("problem").textContent = "";
    byId("about").textContent = `${found.version}, policy ${found.policy}${found.draining ? ", draining" : ""}`;
    showServers(found.servers);
    showCaches(found.servers);
    showMap(found.pool, found.servers);
    showRequests(found.requests);
  } catch (error) {
    byId("problem").textContent = error.message;
  }
  setTimeout(look, 1000);
}

byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value;
  sessionStorage.setItem(KEY, key);
});
look();
