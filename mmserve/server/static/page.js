// The page as a whole: what to do with which files, the key, and the state of the server.

import { getJson, onKeyWanted, postFile, setKey } from "./api.js";
import { Card } from "./card.js";

const MAX_UPLOADS_AT_ONCE = 3;
const order = document.getElementById("order");
const input = document.getElementById("files");
const drop = document.getElementById("drop");
const chosen = document.getElementById("chosen");
const orderError = document.getElementById("order-error");
const results = document.getElementById("results");
const state = document.getElementById("state");
const keyDialog = document.getElementById("key-dialog");

let files = [];

function choose(list) {
  files = [...list];
  const names = files.map((file) => file.name);
  chosen.textContent = files.length ? `Chosen: ${names.slice(0, 5).join(", ")}${names.length > 5 ? ` and ${names.length - 5} more` : ""}` : "";
  orderError.textContent = "";
}

function showOptions() {
  const { task } = Object.fromEntries(new FormData(order));
  for (const label of order.querySelectorAll("[data-for]")) {
    const isWanted = label.dataset.for.split(" ").includes(task);
    label.hidden = !isWanted;
    for (const field of label.querySelectorAll("input, select")) field.disabled = !isWanted;
  }
}

function readOrder() {
  const { task, ...fields } = Object.fromEntries(new FormData(order));
  const given = Object.entries(fields).map(([name, value]) => [name, value.trim()]);
  return { task, options: Object.fromEntries(given.filter(([, value]) => value)) };
}

async function start(event) {
  event.preventDefault();
  if (!files.length) {
    orderError.textContent = "Choose a document first.";
    input.focus();
    return;
  }
  orderError.textContent = "";
  const wanted = readOrder();
  const waiting = files.map((file) => ({ file, card: new Card(file.name, wanted) }));
  results.prepend(...waiting.map(({ card }) => card.root));
  choose([]);
  input.value = "";
  const worker = async () => {
    for (let next = waiting.shift(); next; next = waiting.shift()) await next.card.run(() => postFile(next.file));
  };
  await Promise.all(Array.from({ length: MAX_UPLOADS_AT_ONCE }, worker));
}

/** One dialog, however many requests were refused at once. */
let asking = null;

function askForKey() {
  asking ??= new Promise((resolve) => {
    const field = keyDialog.querySelector("input");
    field.value = "";
    keyDialog.returnValue = "cancel";
    keyDialog.addEventListener(
      "close",
      () => {
        const key = field.value.trim();
        field.value = "";
        asking = null;
        resolve(keyDialog.returnValue === "use" && key ? key : null);
      },
      { once: true },
    );
    keyDialog.showModal();
  });
  return asking;
}

async function showServer() {
  try {
    const { data } = await getJson("v1/models");
    state.textContent = `Ready: ${data[0].id}`;
  } catch (error) {
    state.textContent = error.message;
    if (error.status === 503 || error.status === 0) setTimeout(showServer, 2000);
  }
}

onKeyWanted(askForKey);
document.getElementById("change-key").addEventListener("click", async () => {
  const key = await askForKey();
  if (key !== null) {
    setKey(key);
    showServer();
  }
});
order.addEventListener("change", showOptions);
order.addEventListener("submit", start);
input.addEventListener("change", () => choose(input.files));
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
}
document.addEventListener("dragleave", () => drop.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  if (event.dataTransfer.files.length) choose(event.dataTransfer.files);
});
showOptions();
showServer();
