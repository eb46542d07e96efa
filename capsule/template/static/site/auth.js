// Gets the signed-in user's token from your backend. README.md has examples for common ones.
import { setTokenSource } from "./lib/auth.js";

const BACKEND = ""; // such as "https://backend.example.com"

setTokenSource(async () => {
  if (!BACKEND) throw new Error("Name your backend in auth.js.");
  const response = await fetch(`${BACKEND}/token`, { credentials: "include" });
  if (!response.ok) throw new Error(`The backend returned ${response.status}. Sign in there first.`);
  const { token } = await response.json();
  return token;
});
