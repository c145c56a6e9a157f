// Marks tables that are cut at the right, for their shadow.
for (const box of document.querySelectorAll(".pst-scrollable-table-container")) {
  const mark = () =>
    box.classList.toggle("cut", box.scrollLeft + box.clientWidth < box.scrollWidth - 1);
  box.addEventListener("scroll", mark, { passive: true });
  new ResizeObserver(mark).observe(box);
}

// A result of the search quotes the article, without its title, and not the menu.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  Search.htmlToText = (page, anchor) => {
    const article = new DOMParser()
      .parseFromString(page, "text/html")
      .querySelector("article.bd-article");
    if (!article) return "";
    const section = (anchor && article.querySelector(anchor)) || article;
    const text = section.textContent.trim() ? section : article;
    text
      .querySelectorAll("h1, .headerlink, script, style, .toctree-wrapper, table, pre")
      .forEach((part) => part.remove());
    return text.textContent.replace(/\s+/g, " ").trim();
  };
});
