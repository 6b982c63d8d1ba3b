// Shows /openapi.json with Swagger UI. Where the server has API keys, one is asked for once a tab.
"use strict";

const KEY = "quire-docs-key";
const DOCUMENT = new URL("../../openapi.json", document.currentScript.src); // a proxy may put all of it below a path

async function readDocument() {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const answer = await fetch(DOCUMENT, { headers: key ? { authorization: `Bearer ${key}` } : {} });
    if (answer.status !== 401) return answer.json();
    const given = window.prompt("This server needs an API key:");
    if (!given) throw new Error("The API's description needs one of the server's API keys. Reload to try again.");
    sessionStorage.setItem(KEY, given.trim());
  }
}

readDocument().then(
  (spec) => {
    const ui = SwaggerUIBundle({
      spec,
      dom_id: "#docs",
      deepLinking: true,
      validatorUrl: null,
      onComplete: () => {
        const key = sessionStorage.getItem(KEY);
        if (key) ui.preauthorizeApiKey("key", key);
      },
    });
  },
  (error) => {
    document.getElementById("docs").textContent = error.message;
  },
);
