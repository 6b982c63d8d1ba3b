// The live page of a router: asks for /router/status every second. What it shows is text, never markup.
"use strict";

const KEY = "quire-router-key";
const byId = (id) => document.getElementById(id);
let key = sessionStorage.getItem(KEY) || "";

function cell(row, text, kind) {
  const made = row.insertCell();
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function duration(seconds) {
  return seconds < 1 ? `${(1000 * seconds).toFixed(1)} ms` : `${seconds.toFixed(2)} s`;
}

function showServers(servers) {
  const body = byId("servers");
  body.replaceChildren();
  for (const one of servers) {
    const row = body.insertRow();
    cell(row, one.server);
    cell(row, one.role);
    const again = one.retry_in_s === null ? "" : `, tried again in ${one.retry_in_s} s`;
    cell(row, one.reason ? `${one.state}: ${one.reason}${again}` : one.state, one.state);
    for (const name of ["waiting", "running", "other_requests", "queued_tokens", "prefill_tokens_per_second", "requests",
      "failures"]) cell(row, one[name], "n");
  }
}

function showCost(cost) {
  const fetch = cost.fetch_s ? ` + fetch ${duration(cost.fetch_s)}` : "";
  return `${cost.server} ${duration(cost.total_s)} = compute ${duration(cost.compute_s)}${fetch}`
    + ` + queue ${duration(cost.queue_s)}, ${cost.held} held`;
}

function showRequests(requests) {
  const body = byId("requests");
  body.replaceChildren();
  for (const one of requests) {
    const row = body.insertRow();
    cell(row, one.seconds_ago, "n");
    cell(row, one.request + (one.resumed ? " (goes on)" : ""), "small");
    cell(row, one.prompt_tokens, "n");
    cell(row, one.prefill ? `${one.server}, prompt at ${one.prefill}` : one.server, "chosen");
    const costs = cell(row, "", "small");
    for (const cost of one.costs) {
      const line = document.createElement("div");
      line.textContent = showCost(cost);
      if (cost.server === one.server) line.className = "chosen";
      costs.append(line);
    }
  }
}

async function look() {
  try {
    const answer = await fetch("/router/status", { headers: key ? { authorization: `Bearer ${key}` } : {} });
    byId("login").hidden = answer.status !== 401 && answer.status !== 403;
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error.message);
    byId("problem").textContent = "";
    byId("about").textContent = `${found.version}, policy ${found.policy}${found.draining ? ", draining" : ""}`;
    showServers(found.servers);
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
