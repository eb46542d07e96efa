// A real OpenID provider with pages. Whoever signs in is the person with the e-mail address that they type.
// Run with: node openid_provider.mjs PORT REDIRECT_ADDRESS CLIENT_ID CLIENT_SECRET

import Provider from "../browser/node_modules/oidc-provider/lib/index.js";

const [port, redirect, client_id, client_secret] = process.argv.slice(2);
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id, client_secret, redirect_uris: [redirect] }],
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["groups"] },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: id, email_verified: !id.startsWith("unverified"), groups: [id.split("@")[1]] }),
  }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("listening"));
