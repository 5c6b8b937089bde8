// Search, filters, sorting, copy buttons and hints. Nothing is fetched or sent, and without this script the page shows all.
"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const find = selector => document.querySelector(selector);
  const natural = new Intl.Collator("en", { numeric: true });
  const WORST = ["error", "warning", "unknown", "good", "pending"];

  // Tables and drawings wider than the window say that they scroll. All are measured before any is changed.
  const hint = boxes => {
    const measured = boxes.map(box => ({ box, beyond: box.scrollWidth - box.clientWidth, left: box.scrollLeft }));
    for (const { box, beyond, left } of measured) {
      box.toggleAttribute("data-wide", beyond > 1);
      box.toggleAttribute("data-more", beyond - left > 1);
    }
  };
  const scrolling = all("figure, .wide");
  const watcher = new ResizeObserver(seen => hint(seen.map(({ target }) => target)));
  hint(scrolling);
  for (const box of scrolling) {
    watcher.observe(box);
    box.addEventListener("scroll", () => hint([box]), { passive: true });
  }

  // Names: `layers.37.wq` is one of `layers.[0-79].wq`.
  const isIn = (ranges, number) => ranges.slice(1, -1).split(",").some(range => {
    const [first, last = first] = range.split("-").map(Number);
    return first <= number && number <= last;
  });
  const isPart = (part, text, fits) =>
    fits(part, text) || (/^\[[\d,-]+\]$/.test(part) && /^\d+$/.test(text) && isIn(part, Number(text)));
  const isNamed = (name, word) => {
    if (name.includes(word)) return true;
    const parts = name.split("."), wanted = word.split("."), last = wanted.length - 1;
    if (!last) return false;
    const fits = at => (part, text) => at === 0 ? part.endsWith(text) : at === last ? part.startsWith(text) : part === text;
    return parts.some((_, start) => start + last < parts.length
      && wanted.every((text, at) => isPart(parts[start + at], text, fits(at))));
  };
  const has = (element, words, text) => {
    const names = (element.dataset.names || "").toLowerCase().split(" ");
    return words.every(word => text.includes(word) || names.some(name => isNamed(name, word)));
  };

  // The tools above the page.
  const tools = find("#tools");
  if (!tools) return;
  const search = find("#search"), verdict = find("#verdict"), order = find("#order"), count = find("#count");
  const leaves = all(".tree details.leaf").map(element => ({
    element, item: element.parentElement, text: element.firstElementChild.textContent.toLowerCase(),
    verdict: element.dataset.verdict || "", many: Number(element.dataset.many || 1),
  }));
  const branches = all(".tree details:not(.leaf):not(.ranks)").map(element => ({ element, wasOpen: element.open }));
  const articles = all("article").map(element => ({ element, text: element.textContent.toLowerCase() }));
  const sum = (items, value) => items.reduce((total, item) => total + value(item), 0);

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean), wanted = verdict ? verdict.value : "";
    const isAsked = words.length > 0 || wanted !== "";
    for (const leaf of leaves)
      leaf.item.hidden = !((!wanted || leaf.verdict === wanted) && has(leaf.element, words, leaf.text));
    for (const { element, wasOpen } of branches) {
      const left = all("details.leaf", element).some(leaf => !leaf.parentElement.hidden);
      element.parentElement.hidden = !left;
      element.open = isAsked ? left : wasOpen;
    }
    for (const { element, text } of articles)
      element.hidden = !((!wanted || element.className === wanted) && has(element, words, text));
    const shown = leaves.filter(leaf => !leaf.item.hidden), kept = articles.filter(({ element }) => !element.hidden);
    const tensors = `${sum(shown, leaf => leaf.many)} of ${sum(leaves, leaf => leaf.many)} tensors`;
    const findings = articles.length ? `, ${kept.length} of ${articles.length} findings` : "";
    count.textContent = isAsked ? tensors + findings : "";
  };
  const clear = () => {
    search.value = "";
    if (verdict) verdict.value = "";
    apply();
  };

  // Sorting: modules by what is in them.
  const lists = all("ul.tree, .tree ul").map(list => ({ list, items: [...list.children] }));
  const below = item => all("details.leaf", item);
  const KEYS = {
    worst: item => Math.min(...below(item).map(leaf => WORST.indexOf(leaf.dataset.verdict))),
    largest: item => -sum(below(item), leaf => Number(leaf.dataset.bytes)),
  };
  const sort = () => {
    const key = KEYS[order.value];
    for (const { list, items } of lists) {
      const keyed = items.map(item => ({ item, key: key ? key(item) : 0, name: item.querySelector(".name").textContent }));
      if (key) keyed.sort((one, other) => one.key - other.key);
      if (order.value === "name") keyed.sort((one, other) => natural.compare(one.name, other.name));
      list.append(...keyed.map(({ item }) => item));
    }
  };

  const reveal = () => {
    const anchor = decodeURIComponent(location.hash.slice(1));
    const isMeant = leaf => anchor.startsWith("tensor-") && isNamed(leaf.element.dataset.names, anchor.slice(7));
    const target = document.getElementById(anchor) || leaves.find(isMeant)?.element;
    if (!target) return;
    if (target.closest("[hidden]")) clear();
    for (let one = target; one; one = one.parentElement) if (one.localName === "details") one.open = true;
    target.scrollIntoView();
  };

  tools.hidden = false;
  search.addEventListener("input", apply);
  if (verdict) verdict.addEventListener("change", apply);
  order.addEventListener("change", sort);
  addEventListener("hashchange", reveal);
  addEventListener("keydown", event => {
    const isTyping = event.target.matches("input, select, textarea");
    if (event.key === "/" && !isTyping) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && event.target === search) clear();
  });

  // Tables by a column.
  const valueOf = cell => {
    const exact = cell.querySelector("[data-value]");
    return exact ? Number(exact.dataset.value) : cell.textContent.trim();
  };
  const compare = (one, other) =>
    typeof one === "number" && typeof other === "number" ? one - other : natural.compare(String(one), String(other));
  for (const head of all("table.sortable thead th")) {
    if (!head.textContent) continue;
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isRising = head.getAttribute("aria-sort") === "descending" || !head.classList.contains("number") && !head.ariaSort;
      all("th", head.parentElement).forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isRising ? "ascending" : "descending");
      const body = head.closest("table").tBodies[0];
      const rows = [...body.rows].map(row => ({ row, value: valueOf(row.cells[head.cellIndex]) }));
      rows.sort((one, other) => isRising ? compare(one.value, other.value) : compare(other.value, one.value));
      body.append(...rows.map(({ row }) => row));
    });
  }

  // Fixes to the clipboard; where the browser refuses, the text is selected.
  for (const fix of all(".fix")) {
    const button = document.createElement("button"), text = fix.textContent;
    button.textContent = "Copy";
    button.className = "copy";
    fix.after(button);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(fix);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  }
  if (location.hash) reveal();
})();
