// Search results: tutorials and guides before the reference, which comes before pages about how spattn is made.
const INTERNALS = /^(decisions|notebook)\/|^(internals|design|contract|invariants|faults|cpu-|hopper|systems)/;
const GUIDES = /^(tutorials\/|index$|install$|quickstart$|slow$|scores$|dropout$|compare$|limits$|guarantees$|windows$|threads$)/;

var Scorer = {
  score: ([docname, , , , score]) => {
    if (INTERNALS.test(docname)) return score - 40;
    return GUIDES.test(docname) ? score + 10 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
