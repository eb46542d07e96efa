// Registers an account, shows its API key once, and opens the dashboard with it. The key stays in this page's memory.
// Also plays the example, and copies code.

const DEADLINE = 10_000; // ms for an answer

const find = (selector) => document.querySelector(selector);
const form = find("#register");
const panel = find("#key");
const status = panel.querySelector("[role=status]");
let stored = true; // false while only this page has the key

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const [name, button, refusal] = [form.elements.name, form.querySelector("button"), find("#refusal")];
  if (button.getAttribute("aria-disabled") === "true") return;
  const refuse = (text) => {
    refusal.textContent = text;
    name.setAttribute("aria-invalid", "true");
    name.focus();
  };
  if (!name.value.trim()) return refuse("Enter a name. Only you and the operators of the service can see it.");
  refusal.textContent = "";
  name.removeAttribute("aria-invalid");
  button.setAttribute("aria-disabled", "true"); // `disabled` would take the focus away
  const { ok, body } = await post("/register", { name: name.value.trim() });
  button.removeAttribute("aria-disabled");
  if (!ok) return refuse(explain(body));
  showKey(body.apiKey);
});

function showKey(key) {
  stored = false;
  form.hidden = true;
  panel.hidden = false;
  panel.querySelector("code").textContent = key;
  panel.querySelector("h3").focus();
  find("#copy").addEventListener("click", () => copy(key));
  find("#enter").addEventListener("click", () => enter(key));
}

async function copy(key) {
  try {
    await navigator.clipboard.writeText(key);
    find("#copy").textContent = "Copied";
    status.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(panel.querySelector("code"));
    status.textContent = "Selected. Copy it with your keyboard.";
  }
}

async function enter(key) {
  const { ok, body } = await post("/dashboard/session", { apiKey: key });
  if (!ok) {
    panel.querySelector(".refusal").textContent = explain(body);
    return;
  }
  stored = true;
  location.assign("/dashboard");
}

// Without an answer, the body is empty.
async function post(path, body) {
  const headers = { "Content-Type": "application/json" };
  const signal = AbortSignal.timeout(DEADLINE);
  try {
    const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(body), signal });
    const text = await response.text();
    return { ok: response.ok, body: text ? JSON.parse(text) : {} };
  } catch {
    return { ok: false, body: {} };
  }
}

const explain = ({ error }) =>
  error?.message ?? "The service cannot be reached. Check your connection and try again.";

addEventListener("beforeunload", (event) => {
  if (!stored) event.preventDefault();
});

// -- the example ---------------------------------------------------------------------------------------------

const TOKEN = 45; // ms between two tokens, on average
const WAITS = [1, 0.4, 1.3, 0.6, 2.2, 0.5, 0.9, 1.1]; // times TOKEN, as tokens arrive from a model
const figure = find("#answer");
const [paragraph, again] = [figure.querySelector("p"), figure.querySelector("button")];
const text = paragraph.textContent;
const tokens = text.match(/\s*(\w{1,7}|[^\w\s])/g);
const still = matchMedia("(prefers-reduced-motion: reduce)");
let playing; // the timer

function play() {
  clearTimeout(playing);
  const rest = document.createElement("span");
  rest.className = "rest";
  let [count, shown] = [0, ""];
  const show = () => {
    shown += tokens[count];
    count += 1;
    rest.textContent = text.slice(shown.length);
    paragraph.replaceChildren(shown, rest);
    if (count < tokens.length) playing = setTimeout(show, TOKEN * WAITS[count % WAITS.length]);
  };
  show();
}

if (!still.matches) {
  const watch = new IntersectionObserver(([{ isIntersecting }]) => {
    if (!isIntersecting) return;
    watch.disconnect();
    play();
  }, { threshold: 0.5 });
  watch.observe(figure);
}
again.hidden = false;
again.addEventListener("click", play);

for (const box of document.querySelectorAll(".code")) {
  const button = document.createElement("button");
  const code = box.querySelector("pre");
  button.type = "button";
  button.className = "plain";
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy: ${code.getAttribute("aria-label")}`);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
  box.append(button);
}
