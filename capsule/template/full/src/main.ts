import { startChat } from "./chat.ts";
import { find } from "./dom.ts";
import { startNotes } from "./notes.ts";
import { currentUser, signOut, type User } from "./session.ts";
import { startSignIn } from "./sign-in.ts";
import { openView, showOnly } from "./views.ts";

async function enter(user: User): Promise<void> {
  showOnly("#app-title", "#notes", "#ask");
  find("nav", HTMLElement).hidden = find("#person", HTMLElement).hidden = false;
  find("#email", HTMLElement).textContent = user.email;
  const chat = startChat((text) => notes.add(text));
  const notes = startNotes((text) => chat.askAbout(text));
  openView();
  await notes.load();
}

async function start(): Promise<void> {
  try {
    const user = await currentUser();
    if (user) return await enter(user);
    showOnly("#welcome");
    startSignIn(enter);
  } catch (error) {
    console.error(error);
    showOnly("#failed");
  }
}

addEventListener("hashchange", openView);
find("#failed button", HTMLButtonElement).addEventListener("click", () => location.reload());
find("#sign-out", HTMLButtonElement).addEventListener("click", async () => {
  // A new page has nothing left of this user.
  await signOut().finally(() => location.replace("/"));
});
await start();
