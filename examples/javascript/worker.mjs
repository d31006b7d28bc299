// A worker that borrows devices with kafkajs. Arguments: BOOTSTRAP HOST WORKER RESOURCE=AMOUNT [LEASE_SECONDS]
import { randomUUID } from "node:crypto";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { pathToFileURL } from "node:url";
import kafkajs from "kafkajs";

// Counts from when we began to send the last message that was acknowledged in time. All times are in seconds.
export class Lease {
  constructor(aliveAt, seconds = null) { Object.assign(this, { aliveAt, seconds }); }
  isLost(now) { return this.seconds !== null && now >= this.aliveAt + this.seconds; }
  // After the end an acknowledgement proves nothing: somebody else may have the devices by then.
  acknowledge(sentAt, now) { if (!this.isLost(now)) this.aliveAt = Math.max(this.aliveAt, sentAt); }
}

const WORDS = { allocated: "yours", "allocated superseded": "over", ended: "over",
  releasing: "over", "releasing failed": "failed", failed: "failed" };

// What a record means for the worker with the key `own`, whose host's partition is `home`: a word, and the record.
export function status(own, home, { key, value, partition }) {
  if (own !== key) return ["skip"]; // another worker's, another run's, or a manager's own (@...)
  if (value === null) return [partition === home ? "over" : "skip"]; // a tombstone; elsewhere it means: moved
  let record = {};
  try { record = JSON.parse(value) ?? {}; } catch { /* unreadable: of no type */ }
  if (record.type !== "allocation") return ["skip"];
  const { state, outcome, reason_code } = record;
  return [WORDS[`${state} ${outcome}`] ?? WORDS[`${state} ${reason_code}`] ?? WORDS[state] ?? "waiting", record];
}

// Seconds since boot: most clocks stand still while the machine is suspended, and the lease does not.
const now = () => parseFloat(readFileSync("/proc/uptime", "utf8"));

async function main(bootstrap, host, worker, wanted, asked = "30") {
  const cluster = process.env.OUTFITTER_CLUSTER || "outfitter", [resource, amount] = wanted.split("=");
  const where = process.env.WHERE; // which devices, as JSON
  const run = randomUUID(), own = `${host}/${worker}/${run}`, ledger = `${cluster}.allocations`;
  const { Kafka, Partitioners, logLevel } = kafkajs;
  const kafka = new Kafka({ brokers: bootstrap.split(","), logLevel: logLevel.NOTHING, requestTimeout: asked * 333 });
  const producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner, metadataMaxAge: 5000 });
  const admin = kafka.admin(), consumer = kafka.consumer({ groupId: `outfitter-${run}` }); // a group of one
  const publish = async (fields, within) => { // resolves to the partition, or to nothing if that takes too long
    const value = JSON.stringify({ ...fields, host, worker, incarnation: run });
    const sending = producer.send({ topic: `${cluster}.registrations`, messages: [{ key: host, value }] });
    return (await Promise.race([sending, sleep(within * 1000, [])]))[0]?.partition;
  };
  let leaving = false; // by a signal, or by ourselves: whichever is first
  const leave = async (code, ...why) => {
    if (leaving) return sleep(1e9);
    leaving = true;
    console.log(...why);
    await publish({ type: "deregister", reason: "the worker ends" }, 3).catch(() => {}); // once over: changes nothing
    process.exit(code);
  };
  await Promise.all([admin.connect(), producer.connect(), consumer.connect()]);
  const ends = await admin.fetchTopicOffsets(ledger); // the answer comes behind them
  let sentAt = now(), home;
  const lease = new Lease(sentAt);
  const eachMessage = async ({ partition, message: { key, value } }) => {
    const [word, record] = status(own, home, { key: key?.toString(), value, partition });
    if (word === "over" || word === "failed") return leave(1, word, record?.reason); // the devices are no longer ours
    if (word === "skip") return;
    if (word === "yours" && where && !record.request.choices) return leave(1, "failed: the manager ignores `where`");
    console.log(word, word === "yours" ? JSON.stringify(record.resources) : record.reason);
    lease.seconds = record.request.lease_s; // null: no lease
  };
  await consumer.subscribe({ topic: ledger, fromBeginning: true });
  consumer.on("consumer.crash", ({ payload }) => payload.restart || leave(1, "lost:", payload.error.message));
  await consumer.run({ autoCommit: false, eachMessage });
  for (const { partition, offset } of ends) consumer.seek({ topic: ledger, partition, offset });
  for (const signal of ["SIGTERM", "SIGINT"]) process.on(signal, () => leave(0, "released"));
  lease.aliveAt = sentAt = now();
  const resources = { [resource]: { amount: Number(amount), where: where && JSON.parse(where) } };
  home = await publish({ type: "register", resources, lease_s: Number(asked) }, 30);
  for (;;) {
    await sleep(100);
    if (lease.seconds !== null && now() >= sentAt + lease.seconds / 3) {
      sentAt = now(); // without an answer the next heartbeat may be acknowledged
      const within = Math.min(lease.seconds / 3, lease.aliveAt + lease.seconds - sentAt);
      const partition = await publish({ type: "heartbeat" }, within).catch(() => undefined);
      if ((partition ?? home) !== home) await leave(1, "lost: partitions were added");
      if (partition !== undefined) lease.acknowledge(sentAt, now());
    }
    if (lease.isLost(now())) await leave(1, "lost: no heartbeat was acknowledged for a whole lease");
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main(...process.argv.slice(2));
