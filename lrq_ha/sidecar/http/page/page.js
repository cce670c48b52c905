// Shows /cluster and /history of the node that served this page, again and again. Text becomes text nodes, never markup.
"use strict";

const LOOK_MS = 1000;
const HISTORY_EVERY = 5; // looks
const HISTORY_ROWS = 20;
const RATES_MS = 5 * 60 * 1000;

const rates = []; // {at, rate} of the last five minutes
let last = null; // {at, node, end} of the primary at the last look
let looks = 0;
let failingSince = null;

const find = (id) => document.getElementById(id);

function make(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function showText(id, text) {
  find(id).textContent = text;
  find(id).hidden = !text;
}

function makeTable({ title, headings, rows, remarks, numbers }) {
  const section = make("section");
  if (title) section.append(make("h2", title));
  const frame = make("div", undefined, "frame");
  const table = make("table");
  const top = table.createTHead().insertRow();
  headings.forEach((heading, place) => top.append(make("th", heading, numbers[place] ? "number" : "")));
  const body = table.createTBody();
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((cell, place) => {
      const made = make("td", cell, numbers[place] ? "number" : "");
      if (headings[place] === "ROLE") made.dataset.role = cell;
      row.append(made);
    });
  }
  frame.append(table);
  section.append(frame);
  const list = make("dl", undefined, "remarks");
  for (const [about, text] of remarks) list.append(make("dt", about), make("dd", text));
  if (remarks.length) section.append(list);
  return section;
}

function noteRate(cluster) {
  const primary = cluster.nodes.find((node) => node.name === cluster.primary);
  const now = { at: Date.now(), node: cluster.primary, end: primary ? primary.status.end : null };
  if (last && now.end !== null && last.node === now.node && now.end >= last.end) {
    rates.push({ at: now.at, rate: ((now.end - last.end) * 1000) / Math.max(now.at - last.at, 1) });
  }
  last = now.end === null ? null : now;
  while (rates.length && rates[0].at < now.at - RATES_MS) rates.shift();
  const newest = rates[rates.length - 1];
  find("rate").textContent = newest && newest.at === now.at ? newest.rate.toFixed(0) : "–";
  drawRates(now.at);
}

function drawRates(now) {
  const most = Math.max(1, ...rates.map((one) => one.rate));
  const line = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  const place = (one) => `${(300 * (1 - (now - one.at) / RATES_MS)).toFixed(1)},${(39 - (38 * one.rate) / most).toFixed(1)}`;
  line.setAttribute("points", rates.map(place).join(" "));
  find("rates").replaceChildren(line);
}

function showCluster(cluster) {
  document.title = `${cluster.group}: ${cluster.primary ?? "no primary"}`;
  find("group").textContent = cluster.group;
  find("primary").textContent = cluster.primary ?? "none";
  find("in-sync").textContent = cluster.in_sync.join(", ") || "–";
  showText("trouble", cluster.trouble);
  showText("coordination", cluster.coordination);
  find("tables").replaceChildren(...cluster.tables.map(makeTable));
  noteRate(cluster);
}

function showHistory({ table }) {
  const rows = table.rows.slice(-HISTORY_ROWS).reverse();
  find("history").replaceChildren(makeTable({ ...table, title: "Leaders", rows }));
  find("history").hidden = !rows.length;
}

async function load(path) {
  const answer = await fetch(path, { signal: AbortSignal.timeout(5000) });
  if (!answer.ok) throw new Error(`${path} answered ${answer.status}`);
  return answer.json();
}

async function look() {
  try {
    const cluster = await load("/cluster");
    showCluster(cluster);
    if (cluster.coordination && looks++ % HISTORY_EVERY === 0) load("/history").then(showHistory, () => {}); // etcd may be away
    find("seen").textContent = `seen by ${cluster.node} at ${new Date().toLocaleTimeString()}`;
    failingSince = null;
  } catch (error) {
    failingSince ??= new Date();
    find("seen").textContent = `no answer from ${location.host} since ${failingSince.toLocaleTimeString()} (${error.message}): this page shows older values`;
  }
  document.body.classList.toggle("stale", failingSince !== null);
  setTimeout(look, LOOK_MS);
}

look();
