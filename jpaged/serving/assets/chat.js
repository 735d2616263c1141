// The conversation: what was said, one request at a time, and what its reader can set.
// Everything the model or the server says is put into text nodes, never parsed as HTML.

import { RequestFailed, apiKey, events, request, setApiKey } from "./http.js";

const CONVERSATION = "jpaged-conversation";
const [log, form, box, send, stop, fresh, alertBox, settings, temperature, maxTokens, key] = [
  "log", "composer", "message", "send", "stop", "new", "alert", "settings", "temperature", "max-tokens", "key",
].map((id) => document.getElementById(id));

const NOTES = { length: "Ended at max tokens.", abort: "Ended by the server.", stopped: "Stopped." };

let messages = restored();
let running = null; // the AbortController of the answer that is being written

function restored() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(CONVERSATION) ?? "[]");
    return Array.isArray(kept) ? kept : [];
  } catch {
    return [];
  }
}

function keep() {
  try {
    sessionStorage.setItem(CONVERSATION, JSON.stringify(messages));
  } catch {
    // too long to be kept: it still goes on in this page
  }
}

// A turn in the log; returns the text node that holds what is said.
function show(role, content) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const text = document.createTextNode(content);
  turn.append(who, text);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return text;
}

function note(text, words) {
  const line = document.createElement("span");
  line.className = "note";
  line.textContent = words;
  text.parentElement.append(line);
}

function complain(message) {
  alertBox.textContent = message;
  alertBox.hidden = !message;
}

function setRunning(controller) {
  running = controller;
  send.disabled = fresh.disabled = controller !== null;
  stop.hidden = controller === null;
  log.setAttribute("aria-busy", String(controller !== null)); // an answer is read out whole, not token by token
}

function body(sent) {
  const fields = { messages: sent, stream: true };
  if (temperature.value !== "") fields.temperature = temperature.valueAsNumber;
  if (maxTokens.value !== "") fields.max_tokens = maxTokens.valueAsNumber;
  return fields;
}

async function say(content) {
  complain("");
  const asked = show("user", content);
  const answered = show("assistant", "");
  const sent = [...messages, { role: "user", content }];
  const controller = new AbortController();
  setRunning(controller);
  let reason = null;
  try {
    const response = await request("v1/chat/completions", { body: body(sent), signal: controller.signal });
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      answered.appendData(choice.delta?.content ?? "");
      reason = choice.finish_reason ?? reason;
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else if (error instanceof RequestFailed) {
      complain(error.message);
      if (error.status === 401) askForKey();
    } else {
      complain("The page met an internal error.");
      console.error(error);
    }
    if (!answered.data && error.name !== "AbortError") {
      // nothing came of it: the message goes back into the box, to be sent again
      asked.parentElement.remove();
      answered.parentElement.remove();
      if (!box.value) box.value = content;
      setRunning(null);
      return;
    }
  }
  if (NOTES[reason]) note(answered, NOTES[reason]);
  messages = answered.data ? [...sent, { role: "assistant", content: answered.data }] : messages;
  keep();
  setRunning(null);
}

function askForKey() {
  settings.open = true;
  key.focus();
}

function submit() {
  const content = box.value.trim();
  if (!content || running || !form.reportValidity()) return;
  box.value = "";
  box.focus();
  say(content);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});

box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});

stop.addEventListener("click", () => {
  running?.abort();
  box.focus();
});

fresh.addEventListener("click", () => {
  messages = [];
  keep();
  log.replaceChildren();
  complain("");
  box.focus();
});

key.value = apiKey();
key.addEventListener("change", () => {
  setApiKey(key.value.trim());
  complain("");
  document.dispatchEvent(new Event("jpaged-key"));
  showModel();
});

async function showModel() {
  const name = document.getElementById("model");
  try {
    name.textContent = (await (await request("v1/models")).json()).data[0].id;
  } catch (error) {
    name.textContent = "";
    if (error.status === 401) {
      complain(apiKey() ? error.message : "This server needs an API key.");
      settings.open = true;
    }
  }
}

for (const { role, content } of messages) show(role, content);
showModel();
