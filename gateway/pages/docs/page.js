const ORDER = ["Inference", "Account", "Deploy hooks", "Agents", "Platform", "Operation", "Pages"];

SwaggerUIBundle({
  url: "/docs/openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  docExpansion: "list",
  tagsSorter: (one, other) => ORDER.indexOf(one) - ORDER.indexOf(other),
});
