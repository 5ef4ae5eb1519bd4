// What keys may do, in words.

const NAMES = {
  inference: "send requests",
  view_workers: "see workers",
  manage_workers: "manage workers",
  view_usage: "see the usage log",
  manage_keys: "manage keys",
};
// Those of each role, as the gateway has them; keys may have more.
const OF_MEMBER = ["inference", "view_workers", "view_usage"];
const OF_OPERATOR = [...OF_MEMBER, "manage_workers"];

export const ROLES = { owner: Object.keys(NAMES), operator: OF_OPERATOR, member: OF_MEMBER };

export function inWords(permissions) {
  return Object.keys(NAMES).filter((name) => permissions.includes(name)).map(nameOf).join(", ");
}

export function nameOf(permission) {
  return NAMES[permission] ?? permission;
}

/** [permission, name] of what the role alone doesn't allow. */
export function beyond(role) {
  return Object.entries(NAMES).filter(([permission]) => !ROLES[role].includes(permission));
}
