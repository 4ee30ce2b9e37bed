// Galleries: filters, order and arrow keys. Without this script all cards are shown, in the order of the page.
"use strict";

for (const gallery of document.querySelectorAll(".gallery")) {
  const list = gallery.querySelector(".cards");
  const cards = [...list.children]; // in the order of the page
  const filters = [...gallery.querySelectorAll("select[data-filter]")];
  const order = gallery.querySelector("select[data-order]");
  const count = gallery.querySelector(".count");

  /** Whether a card has the value of each filter, without one of them. */
  const matches = (card, without) =>
    filters.every((filter, f) => filter === without || filter.value === "" || card.dataset[`f${f}`] === filter.value);

  function update() {
    const ordered = order.value === "reverse" ? [...cards].reverse() : cards;
    list.append(...ordered);
    for (const card of cards) card.hidden = !matches(card);
    filters.forEach((filter, f) => {
      const left = cards.filter((card) => matches(card, filter)); // by the other filters
      for (const option of filter.options) {
        const images = option.value === "" ? left : left.filter((card) => card.dataset[`f${f}`] === option.value);
        option.textContent = `${option.dataset.text} (${images.length})`;
        option.disabled = images.length === 0 && !option.selected && option.value !== "";
      }
    });
    const shown = visible();
    count.textContent = `${shown.length} of ${cards.length} shown. Arrow keys move between them.`;
    enter(shown[0]);
  }

  const visible = () => [...list.children].filter((card) => !card.hidden);

  /** The card that the Tab key reaches; arrow keys reach the others. */
  function enter(card) {
    for (const other of cards) other.tabIndex = other === card ? 0 : -1;
  }

  list.addEventListener("keydown", (event) => {
    const shown = visible();
    const at = shown.indexOf(document.activeElement);
    const columns = shown.filter((card) => card.offsetTop === shown[0].offsetTop).length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: shown.length - 1 - at };
    if (at < 0 || !(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    const next = shown[at + steps[event.key]];
    if (!next) return;
    enter(next);
    next.focus();
  });
  list.addEventListener("focusin", (event) => enter(event.target.closest(".card")));
  for (const select of [...filters, order]) select.addEventListener("change", update);
  gallery.querySelector("button").addEventListener("click", () => {
    for (const select of [...filters, order]) select.selectedIndex = 0;
    update();
  });
  gallery.querySelector(".filters").hidden = false;
  update();
}
