// What compose.py does, in a browser: the same functions, which give the same text to the byte.
const compose = (() => {
  const WIDTH = 100; // of a line

  const words = { and: "&&", or: "||", not: "!" };
  const compiled = {}; // to make a function takes longer than to call it

  // Whether a condition holds: names, which are true if they are in `names`; and, or, not, ( ).
  function holds(condition, names) {
    if (!compiled[condition]) {
      const code = condition.replace(/\w+/g, (word) => words[word] || `names.has("${word}")`);
      compiled[condition] = Function("names", "return " + code);
    }
    return compiled[condition](names);
  }

  // Why these names make no sense together, in one line; "" if they do.
  function refusal(known, chosen, language) {
    const rule = known.refused.find((rule) => holds(rule.when, chosen));
    return rule ? rule.why[language] : "";
  }

  // The command that makes this script.
  function madeBy(known, chosen) {
    const [start] = known.starts.filter((choice) => chosen.has(choice.name));
    const [data] = known.data.filter((choice) => chosen.has(choice.name));
    const lines = [];
    let line = `python compose.py ${start.name}` + (data.name === "digits" ? "" : ` --data ${data.name}`);
    known.features
      .filter((choice) => chosen.has(choice.name))
      .forEach(({ name }, number) => {
        const word = number ? name : ` --with ${name}`;
        line += number ? "," : "";
        if ((line + word).length > WIDTH - 12) {
          lines.push(line + "\\");
          line = "";
        }
        line += word;
      });
    return [...lines, line].join("\n");
  }

  // The script that a template gives for the names in `chosen`, a Set.
  function render(template, chosen, file, made) {
    const names = new Set(made ? [...chosen, "made"] : chosen);
    const words = { file, made };
    const filled = (text) => text.replace(/\$([a-z_]+)/g, (_, word) => words[word]);

    function chosenText(texts) {
      for (const part of texts.split(" else ")) {
        const [text, condition] = part.split(" if ");
        if (!condition || holds(condition, names)) return filled(text);
      }
      return "";
    }

    const lines = [];
    const blocks = []; // of each open one: shown, whether one of its parts was, its indent
    for (const line of template.replace(/\n$/, "").split("\n")) {
      const [, directive, rest] = line.trim().match(/^(\S*) ?(.*)$/);
      if (directive === "#if") {
        const now = holds(rest, names);
        blocks.push({ shown: now, done: now, indent: "" });
      } else if (directive === "#indent") {
        blocks.push({ shown: true, done: true, indent: holds(rest, names) ? "    " : "" });
      } else if (directive === "#elif" || directive === "#else") {
        const block = blocks[blocks.length - 1];
        block.shown = !block.done && (directive === "#else" || holds(rest, names));
        block.done = block.done || block.shown;
      } else if (directive === "#end") {
        blocks.pop();
      } else if (directive === "#let") {
        const cut = rest.indexOf(" = ");
        const name = rest.slice(0, cut);
        const value = rest.slice(cut + 3);
        if (name.startsWith("$")) words[name.slice(1)] = chosenText(value);
        else if (holds(value, names)) names.add(name);
      } else if (directive !== "##" && blocks.every((block) => block.shown)) {
        const indent = blocks.map((block) => block.indent).join("");
        for (const part of filled(line).split("\n")) lines.push(part ? indent + part : "");
      }
    }
    return usedImports(lines).join("\n") + "\n";
  }

  // The lines without the imports that they do not use; a long import in brackets.
  function usedImports(lines) {
    const end = lines.indexOf('"""') + 1;
    const imports = lines.map((line) => line.match(/^((?:from \S+ )?import )(.*)/));
    const rest = lines.filter((_, i) => i >= end && !imports[i]);
    const code = rest.join("\n").replace(/(^|\s)#.*|"[^"\n]*"/gm, "");
    const used = new Set(code.match(/(?<![\w.])\w+\.?/g)); // with the dot behind a name
    const kept = lines.slice(0, end);
    lines.slice(end).forEach((line, i) => {
      const match = imports[end + i];
      if (!match) {
        if (line || kept[kept.length - 1] || kept[kept.length - 2] !== '"""') kept.push(line);
      } else if (line.startsWith("import")) {
        if (used.has(match[2].split(" ").pop() + ".")) kept.push(line);
      } else {
        const names = match[2].split(", ").filter((n) => used.has(n) || used.has(n + "."));
        const short = match[1] + names.join(", ");
        if (short.length > WIDTH) kept.push(match[1] + "(", ...names.map((n) => `    ${n},`), ")");
        else if (names.length) kept.push(short);
      }
    });
    return kept;
  }

  return { holds, refusal, madeBy, render };
})();
