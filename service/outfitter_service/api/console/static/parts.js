// Devices that are parts of others, and how that keeps them from being lent.

/** The holders of a device that keep it from others. */
export const inTheWay = (holders, device) => holders.filter(holder => !holder.shared || device.sharing !== "shared");

/** Devices, with `kept` where somebody holds a part of one, or what it is a part of. `byName`: devices by each name. */
export function withKept(devices, byName) {
  if (!devices.some(device => device.part_of || device.kept)) return devices; // nearly always
  const named = byName(devices), wholes = device => {
    const found = new Set(), todo = [device];
    for (const { part_of: whole } of todo)
      for (const each of whole ? named.get(whole) ?? [] : [])
        if (each !== device && !found.has(each)) todo.push((found.add(each), each));
    return found;
  };
  const related = new Map(devices.map(device => [device, []]));
  for (const part of devices)
    for (const whole of wholes(part)) related.get(part).push(whole), related.get(whole).push(part);
  return devices.map(device => {
    const kept = related.get(device).some(other => inTheWay(other.holders, device).length);
    return kept === (device.kept ?? false) ? device : { ...device, kept };
  });
}

/** What each part in a resource of a host's record is a part of, by its id. */
export const wholesIn = ({ parts = {} }) =>
  new Map(Object.entries(parts).flatMap(([whole, names]) => names.map(name => [name, whole])));
