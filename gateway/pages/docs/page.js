// A class turns on Swagger's dark style.
const dark = matchMedia("(prefers-color-scheme: dark)");
const dress = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", dress);
dress();

const ORDER = ["Inference", "Account", "Deploy hooks", "Agents", "Platform", "Operation", "Pages"];

SwaggerUIBundle({
  url: "/docs/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  docExpansion: "list",
  tagsSorter: (one, other) => ORDER.indexOf(one) - ORDER.indexOf(other),
});
