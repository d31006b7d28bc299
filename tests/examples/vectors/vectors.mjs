// Checks examples/javascript against the vectors in the folder that is the argument: prints what differs, and how many there were.
import { readFileSync } from "node:fs";
import kafkajs from "kafkajs";
import { Lease, status } from "./worker.mjs";

const load = (name) => JSON.parse(readFileSync(`${process.argv[2]}/${name}.json`, "utf8"));
let checked = 0, wrong = 0;
function check(name, expected, actual) {
  checked += 1;
  if (expected === actual) return;
  wrong += 1;
  console.log(`${name}: ${actual} instead of ${expected}`);
}

const records = load("records"), own = `${records.host}/${records.worker}/${records.incarnation}`;
const word = ({ key, partition, text, value }) =>
  status(own, records.partition, { key, partition, value: text ?? (value === null ? null : JSON.stringify(value)) })[0];
for (const row of records.vectors) check(row.name, row.then, word(row));
for (const { name, only, records: rows } of load("sequences").vectors) {
  if (only) continue; // the example never registers again
  let now = "waiting";
  for (const row of rows) {
    const next = word(row);
    if (next !== "skip" && now !== "over" && now !== "failed") now = next;
    check(name, row.then, now);
  }
}
for (const vector of load("leases").vectors) {
  const lease = new Lease(vector.registered_at, vector.lease_s);
  for (const { at, acknowledged, then } of vector.steps) {
    if (acknowledged !== undefined) lease.acknowledge(acknowledged, at);
    check(vector.name, then === "lost", lease.isLost(at));
  }
}
for (const { host, partitions, partition } of load("partitions").vectors) {
  const partitionMetadata = Array.from({ length: partitions }, (_, partitionId) => ({ partitionId, leader: 0 }));
  const chosen = kafkajs.Partitioners.DefaultPartitioner()({ topic: "t", partitionMetadata, message: { key: Buffer.from(host) } });
  check(host, partition, chosen);
}
console.log(`${checked} checked, ${wrong} wrong`);
process.exit(wrong === 0 ? 0 : 1);
