// The conversation: what was said, one request at a time, and what its reader can set.
// Everything the model or the server says is put into text nodes, never parsed as HTML.

import { RequestFailed, apiKey, events, request, setApiKey } from "./http.js";
import { render } from "./markdown.js";

const CONVERSATION = "jpaged-conversation";
const SYSTEM = "jpaged-system";
const [log, form, box, send, stop, fresh, alertBox, settings, temperature, maxTokens, system, schema, key] = [
  ...["log", "composer", "message", "send", "stop", "new", "alert", "settings", "temperature", "max-tokens"],
  ...["system", "schema", "key"],
].map((id) => document.getElementById(id));

const NOTES = {
  length: "Ended at max tokens, or where the model’s context ends.",
  abort: "Ended by the server.",
  stopped: "Stopped.",
};
const TOO_LONG = "The conversation is longer than this model can read. Begin a new chat, or shorten the message.";

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

// A turn in the log; returns the element that holds what is said.
function show(role, content) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const said = document.createElement("div");
  said.className = "said";
  said.append(content);
  turn.append(who, said);
  log.append(turn);
  log.scrollTop = log.scrollHeight;
  return said;
}

// Where the model's reasoning goes: folded, in front of what is said.
function reasoningBefore(said) {
  const fold = document.createElement("details");
  fold.className = "reasoning";
  const words = document.createElement("summary");
  words.textContent = "Reasoning";
  const thought = document.createElement("div");
  fold.append(words, thought);
  said.before(fold);
  return thought;
}

// JSON over several lines, as Markdown's code; null if it is none.
function asJson(content) {
  try {
    const value = JSON.parse(content);
    return typeof value === "object" && value ? "```json\n" + JSON.stringify(value, null, 2) + "\n```" : null;
  } catch {
    return null;
  }
}

// An answer that is complete: as Markdown, with what can be done with it.
function settle(said, content) {
  said.dataset.raw = content;
  said.replaceChildren(render(asJson(content) ?? content, document));
  const copy = button("Copy", async () => {
    try {
      await navigator.clipboard.writeText(content);
      copy.textContent = "Copied";
    } catch {
      copy.textContent = "Not allowed here"; // browsers have no clipboard for pages without HTTPS
    }
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  const actions = document.createElement("div");
  actions.className = "actions";
  actions.append(copy, button("Answer again", answerAgain));
  said.after(actions);
}

function button(words, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "quiet";
  made.textContent = words;
  made.addEventListener("click", act);
  return made;
}

// Only the last answer can be made again (the others' buttons are hidden): it is dropped, and its question asked anew.
function answerAgain() {
  checkSchema();
  if (running || messages.length < 2 || !form.reportValidity()) return;
  const question = messages.at(-2).content;
  messages = messages.slice(0, -2);
  log.lastElementChild.remove();
  log.lastElementChild.remove();
  say(question);
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
  const before = system.value.trim() ? [{ role: "system", content: system.value.trim() }] : [];
  const fields = { messages: [...before, ...sent], stream: true };
  if (temperature.value !== "") fields.temperature = temperature.valueAsNumber;
  if (maxTokens.value !== "") fields.max_tokens = maxTokens.valueAsNumber;
  if (schema.value.trim()) {
    const wanted = JSON.parse(schema.value);
    fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted, strict: true } };
  }
  return fields;
}

// Says in the form what is wrong with the schema, if anything is.
function checkSchema() {
  let wrong = "";
  try {
    const wanted = schema.value.trim() ? JSON.parse(schema.value) : {};
    if (typeof wanted !== "object" || wanted === null || Array.isArray(wanted)) wrong = "A schema is a JSON object.";
  } catch (error) {
    wrong = `This is no JSON: ${error.message}`;
  }
  schema.setCustomValidity(wrong);
  if (wrong) settings.open = true;
}

async function say(content) {
  complain("");
  const asked = show("user", content);
  const answered = show("assistant", "");
  const sent = [...messages, { role: "user", content }];
  const controller = new AbortController();
  setRunning(controller);
  let reason = null;
  let answer = "";
  let thought = null;
  try {
    const response = await request("v1/chat/completions", { body: body(sent), signal: controller.signal });
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
      const why = choice.delta?.reasoning_content ?? "";
      if (why) {
        thought ??= reasoningBefore(answered);
        thought.append(why);
      }
      const more = choice.delta?.content ?? "";
      answer += more;
      if (more) answered.append(more);
      reason = choice.finish_reason ?? reason;
      if (follows) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else if (error instanceof RequestFailed) {
      complain(error.code === "context_length_exceeded" ? TOO_LONG : error.message);
      if (error.status === 401) askForKey();
    } else {
      complain("The page met an internal error.");
      console.error(error);
    }
    if (!answer && error.name !== "AbortError") {
      // nothing came of it: the message goes back into the box, to be sent again
      asked.parentElement.remove();
      answered.parentElement.remove();
      if (!box.value) box.value = content;
      setRunning(null);
      return;
    }
  }
  if (NOTES[reason]) note(answered, NOTES[reason]);
  if (answer) settle(answered, answer);
  messages = answer ? [...sent, { role: "assistant", content: answer }] : messages;
  keep();
  setRunning(null);
}

function askForKey() {
  settings.open = true;
  key.focus();
}

function submit() {
  const content = box.value.trim();
  checkSchema();
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

system.value = sessionStorage.getItem(SYSTEM) ?? "";
system.addEventListener("change", () => sessionStorage.setItem(SYSTEM, system.value));

schema.addEventListener("input", () => schema.setCustomValidity(""));

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

for (const { role, content } of messages) {
  const said = show(role, content);
  if (role === "assistant") settle(said, content);
}
showModel();
