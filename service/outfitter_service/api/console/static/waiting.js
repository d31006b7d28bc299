// Who waits: one entry for all that have one reason and one wish.
import { amounts } from "./words.js";

/** The groups, the longest wait first: the waiters of each, the longest first, and why. */
export function waitingGroups(fleet) {
  const groups = new Map();
  for (const host of fleet.hosts.values())
    for (const waiter of host.waiting) {
      const key = `${waiter.code}\n${amounts(waiter.amounts)}`;
      const group = groups.get(key) ?? groups.set(key, { key, waiters: [] }).get(key);
      group.waiters.push(waiter);
    }
  const inOrder = (a, b) => Date.parse(a.since) - Date.parse(b.since);
  for (const group of groups.values()) {
    group.waiters.sort(inOrder);
    const reasons = new Set(group.waiters.map(waiter => waiter.reason));
    const [first] = group.waiters;
    group.reason = `${first.reason ?? "not decided yet"}${reasons.size > 1 ? ", and the like" : ""}`;
  }
  return [...groups.values()].sort((a, b) => inOrder(a.waiters[0], b.waiters[0]));
}
