// Reads an AsyncAPI document from standard input and judges it with AsyncAPI's own parser: exit code 1 where that refuses it.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";

const require = createRequire(resolve(process.argv[2], "package.json"));
const { Parser } = require("@asyncapi/parser");

const { document, diagnostics } = await new Parser().parse(readFileSync(0, "utf8"));
const WORST = 1; // 0 is an error, 1 a warning; what is less is advice
for (const { code, severity, path, message } of diagnostics) {
  console.log(`${["error", "warning", "information", "hint"][severity]} ${code} at ${path.join(".")}: ${message}`);
}
const refused = !document || diagnostics.some(({ severity }) => severity <= WORST);
if (document) {
  console.log(`AsyncAPI ${document.version()}: ${document.channels().length} channels, ` +
    `${document.operations().length} operations, ${document.messages().length} messages`);
}
process.exit(refused ? 1 : 0);
