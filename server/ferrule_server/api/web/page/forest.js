// From the list of live sequences to the rows of the fork tree: who branched from whom, and what is drawn as a group.
import { num } from "./format.js";

const ALL_SHOWN = 40;
const FEW = 4;
const MOST_ROWS = 400;
const SOON_S = 10;
const SOON_SHARE = 0.2;

/** The sequences of a view with their branches, oldest first: trees before those that stand alone. */
export function forestOf(view) {
  const blockSize = num(view.block_size) || 1;
  const now = Date.parse(view.time);
  const nodes = new Map((view.sequences ?? []).map((each) => [each.summary.handle_id, nodeOf(each, blockSize, now)]));
  const roots = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parentId);
    (parent?.children ?? roots).push(node);
    node.parent = parent ?? null;
  }
  for (const node of nodes.values()) node.children.sort(byAge);
  roots.sort(byAge);
  const trees = roots.filter((node) => node.children.length);
  return { nodes, trees, alone: roots.filter((node) => !node.children.length) };
}

function nodeOf(each, blockSize, now) {
  const { summary } = each;
  const left = num(summary.lease?.expires_in);
  const ttl = num(summary.lease?.ttl);
  const isAtWork = Boolean(each.is_appending) || num(each.num_pending) > 0;
  const length = num(summary.length);
  return {
    id: summary.handle_id,
    parentId: each.parent_handle_id ?? "",
    principal: each.principal ?? "",
    length,
    shared: Math.min(length, num(summary.num_shared_blocks) * blockSize),
    blocks: num(summary.num_blocks),
    sharedBlocks: num(summary.num_shared_blocks),
    age: (now - Date.parse(summary.create_time)) / 1e3 || 0,
    left,
    ttl,
    pending: num(each.num_pending),
    isAtWork,
    isSoon: !isAtWork && left < Math.min(SOON_S, ttl * SOON_SHARE),
    children: [],
    parent: null,
  };
}

// A fork makes its branches at one moment: their names tell them apart, the same way each time.
const byAge = (one, other) => other.age - one.age || (one.id < other.id ? -1 : 1);

/**
 * The rows to draw, from top to bottom: { key, depth, node } or { key, depth, group, parent, noun }.
 *
 * With many sequences, branches of one parent that have none themselves, and prompts of one principal that stand alone,
 * are drawn as a group where there are more than a few, unless it is opened.
 */
export function rowsOf(forest, opened) {
  const isLarge = forest.nodes.size > ALL_SHOWN;
  const rows = [];
  const walk = (node, depth) => {
    rows.push({ key: node.id, depth, node });
    addAll(node.children, `of ${node.id}`, depth + 1, node, "branch", "branches");
  };
  const addAll = (nodes, key, depth, parent, ...nouns) => {
    const leaves = nodes.filter((each) => !each.children.length);
    const isGroup = isLarge && leaves.length > FEW;
    const isOpen = opened.has(key);
    for (const node of nodes) if (node.children.length || !isGroup) walk(node, depth);
    if (isGroup) rows.push({ key, depth, group: leaves, parent, nouns, isOpen });
    if (isGroup && isOpen) for (const node of leaves) walk(node, depth);
  };
  for (const tree of forest.trees) walk(tree, 0);
  for (const [principal, nodes] of byPrincipal(forest.alone)) {
    addAll(nodes, `by ${principal}`, 0, null, `prompt of ${principal}`, `prompts of ${principal}`);
  }
  return { rows: rows.slice(0, MOST_ROWS), numLeftOut: Math.max(0, rows.length - MOST_ROWS) };
}

function byPrincipal(nodes) {
  const groups = new Map();
  for (const node of nodes) groups.set(node.principal, [...(groups.get(node.principal) ?? []), node]);
  return [...groups].sort(([one], [other]) => (one < other ? -1 : 1));
}

/**
 * Where a branch leaves its parent, in tokens: up to there both hold the same blocks.
 *
 * Sequences share from their beginning on, so it is what both share, unless each shares more with somebody else.
 */
export function branchPoint(node, parent) {
  return parent === null ? 0 : Math.min(node.shared, parent.shared, node.length, parent.length);
}
