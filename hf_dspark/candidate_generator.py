"""One round of drafting: the target's hidden states in, a scheduled block of candidate tokens out.

`observe` queues what the target's latest forward thought about the tokens it kept. `propose` runs the drafter over the new
context rows and one block (parallel stage), then goes through the block left to right, biasing each position by the token
chosen before it (sequential stage), and asks the scheduler how many tokens are worth verifying.

The class is a `CandidateGenerator` of transformers: the host's own batch-1 loop can drive it through `get_candidates`. The
loop in `decoding.py` uses `observe` and `propose` directly, for any number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import CandidateGenerator
from transformers.utils import ModelOutput, logging

from . import scheduling
from .cache import RowLayout, SlotCache, format_mask, slot_ranges
from .modeling_dspark import DSparkDraftModel
from .processing import RowProcessors
from .profitability import Profitability

logger = logging.get_logger(__name__)

SCHEDULING_MODES = ("full", "threshold", "early_stop", "two_step", "presampled")

_HOST_LIMIT = 20  # transformers' own `num_assistant_tokens`
_UNPROJECTED_ROWS = 64  # captured states of a row that may wait to be projected together


@dataclass(frozen=True)
class CandidateBlock:
    """A drafted and scheduled block for R rows.

    Args:
        tokens (`torch.LongTensor` of shape `(R, L)`): draft tokens; L is the longest scheduled length.
        lengths (`torch.LongTensor` of shape `(R,)`): how many of them to verify; on the host.
        logits (`torch.Tensor` of shape `(R, L, Vd)`, *optional*): when sampling, logits of the laws they were drawn from.
        token_ids (`torch.LongTensor` of shape `(Vd,)`, *optional*): target token of each draft logit, if the two differ.
        confidence (`torch.Tensor` of shape `(R, K)`, *optional*): what the scheduler read; fewer columns where no row has
            room for K tokens.
        base_tokens (`torch.LongTensor` of shape `(R, L)`, *optional*): likeliest tokens before the sequential head; only for
            a drafter with a listener (`on_round`).
        log_odds (`torch.Tensor` of shape `(R, L)`, *optional*): those that the drafter gives the tokens, in greedy
            decoding; only where the calibration or a listener reads them.
    """

    tokens: Tensor
    lengths: Tensor
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    confidence: Tensor | None = None
    base_tokens: Tensor | None = None
    log_odds: Tensor | None = None


class DSparkCandidateGenerator(CandidateGenerator):
    """Drafts with a [`DSparkDraftModel`] that is bound to its target.

    Args:
        drafter ([`DSparkDraftModel`]): bound to the target.
        logits_processor ([`RowProcessors`] or `LogitsProcessorList`): the processors of this call.
        do_sample (`bool`): whether tokens are sampled.
        max_length (`int`, *optional*): longest sequence of the call, in tokens; only the host's own loop needs it.
        max_draft_tokens (`int`, *optional*): longest draft; the drafter's K when not given.

    Raises:
        ValueError: `drafter.scheduling` names no mode, or one that this drafter cannot run; `drafter.confidence_threshold` or
            `drafter.threshold_on` is not what its mode needs; or `drafter.head_candidates` is no number of tokens.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DSparkDraftModel,
        logits_processor: RowProcessors | LogitsProcessorList,
        do_sample: bool,
        max_length: int | None = None,
        max_draft_tokens: int | None = None,
    ):
        config = drafter.config
        if not isinstance(logits_processor, RowProcessors):
            logits_processor = RowProcessors(logits_processor, batch_size=1)
        self.drafter, self.processors, self.do_sample, self.max_length = drafter, logits_processor, do_sample, max_length
        self.block_limit = config.num_draft_tokens
        if max_draft_tokens is not None and max_draft_tokens < self.block_limit:
            if max_draft_tokens == _HOST_LIMIT:
                logger.warning_once(
                    f"The drafter drafts {self.block_limit} tokens, and `num_assistant_tokens` is {max_draft_tokens}, which is "
                    "also what transformers sets where nothing is given: drafts end there. Pass a larger one to `generate`."
                )
            self.block_limit = max_draft_tokens
        # hidden_states[k + 1] is the output of decoder layer k, hidden_states[0] the embedding
        self.captured_states = [layer + 1 for layer in config.target_layer_ids]
        self.model_kwargs_overrides: dict[str, Any] = {"output_hidden_states": self.captured_states}
        self.statistics = drafter.statistics
        self.mode = self._choose_mode()
        self.profitability = Profitability(drafter.load_profile) if self.mode != "full" else None
        self.cache = SlotCache(config)
        self.layout: RowLayout | None = None
        self.packs = True  # whether several rows are verified without padding; who verifies says so
        # Context for the next draft: (R, Q, ·) states, first slots, counts; the first so many projected, others as captured.
        self._pending: list[tuple[Tensor, list[int], list[int]]] = []
        self._projected = 0
        self._first_slot = 0  # of the first context row; earlier ones were in a cache passed in
        self._drafted = False  # whether the latest round had a draft
        self._spent: tuple[float, float] | None = None  # of drafting and verification up to the latest round
        self._scheduled = 0  # its length, while the host's own loop verifies it
        self._older_confidence: list[Tensor] = []  # two_step: confidences of the two latest rounds

    def _choose_mode(self) -> str:
        drafter, mode = self.drafter, self.drafter.scheduling
        profile, candidates = drafter.load_profile, drafter.head_candidates
        if candidates is not None and (not isinstance(candidates, int) or candidates < 1):
            raise ValueError(f"`head_candidates` must be None or a number of tokens from 1, got {candidates!r}.")
        if mode is not None and mode not in SCHEDULING_MODES:
            raise ValueError(f"`scheduling` must be None or one of {', '.join(SCHEDULING_MODES)}, got {mode!r}.")
        if drafter.confidence_head is None and mode not in (None, "full"):
            raise ValueError(
                f"`scheduling` is {mode!r}, but this drafter has no confidence head to schedule by; use None or 'full'."
            )
        if mode == "threshold":
            names = "confidence_threshold", "threshold_on"
            scheduling.check_threshold(drafter.confidence_threshold, drafter.threshold_on, names)
        if mode in ("full", "threshold"):
            return mode
        if profile is None or profile.is_flat:
            logger.warning_once(
                "The drafter has no load profile, or one whose steps all cost the same: every drafted token will be verified. "
                "Set `drafter.load_profile = LoadProfile.measure(target, drafter)` to let the machine's cost decide."
            )
            return "full"
        if drafter.confidence_head is None:
            return "history"
        if mode == "presampled" and not self.do_sample and self._weighs_log_odds:
            return "search"  # as exact in greedy decoding, and these confidences are known behind the draft only
        return mode or ("presampled" if self.do_sample else "search")

    @property
    def _weighs_log_odds(self) -> bool:
        """Whether the confidences of this way of decoding depend on how likely the drafter finds its own tokens."""
        return self.drafter.config.calibration(greedy=not self.do_sample)[2] is not None

    # ---- context ----

    def start(self, layout: RowLayout, first_slot: int = 0) -> None:
        """Begins a call.

        Args:
            layout (`RowLayout`): where its rows sit in the cache.
            first_slot (`int`, defaults to 0): slot of the first state that will be observed.
        """
        self.layout, self._first_slot = layout, first_slot

    def observe(self, hidden_states: tuple[Tensor, ...], first_slots: list[int], counts: list[int]) -> None:
        """Queues captured target states as new context.

        Args:
            hidden_states (tuple of `torch.Tensor`s of shape `(R, Q, target_hidden_size)`): as returned by the target.
            first_slots (`list[int]`): slot of each row's first state.
            counts (`list[int]`): how many of the Q states of each row belong to committed tokens.
        """
        longest = max(counts)
        device = self.drafter.device
        states = torch.cat([hidden_states[i][:, :longest].to(device) for i in self.captured_states], dim=-1)
        self._pending.append((states, first_slots, counts))
        # Row by row, the projection would read its whole weight for every plain step; a prompt's states should not wait.
        if sum(states.shape[1] for states, _, _ in self._pending[self._projected :]) > _UNPROJECTED_ROWS:
            self._project_pending()

    def _project_pending(self) -> None:
        """Projects all captured states that wait, in one go: they are several times as wide as what they become."""
        waiting = self._pending[self._projected :]
        if not waiting:
            return
        context = self.drafter.project_context(torch.cat([states for states, _, _ in waiting], dim=1))
        pieces = context.split([states.shape[1] for states, _, _ in waiting], dim=1)
        self._pending[self._projected :] = [
            (piece, first_slots, counts) for piece, (_, first_slots, counts) in zip(pieces, waiting, strict=True)
        ]
        self._projected = len(self._pending)

    def select_rows(self, rows: Tensor) -> None:
        """Keeps only the given rows, in that order.

        Args:
            rows (`torch.LongTensor` of shape `(kept rows,)`): their places so far.
        """
        self._project_pending()
        kept = rows.tolist()
        self.cache.select_rows(rows)
        pending = []
        for states, first_slots, counts in self._pending:
            first_slots, counts = [first_slots[i] for i in kept], [counts[i] for i in kept]
            if max(counts):
                pending.append((states[rows.to(states.device), : max(counts)], first_slots, counts))
        self._pending, self._projected = pending, len(pending)
        self._older_confidence = [confidence[kept] for confidence in self._older_confidence]

    def settle(self, sequences: list[Tensor], slots: list[int]) -> None:
        """Moves the queued context into the drafter's cache, by a draft that nobody reads.

        Args:
            sequences, slots: as in `propose`.
        """
        self._draft_states(sequences, slots)

    def join(self, other: DSparkCandidateGenerator, length: int) -> None:
        """Takes over the rows of another generator as further, last rows.

        Args:
            other ([`DSparkCandidateGenerator`]): of the same drafter, settled after its prefill; this one has drafted or
                settled as well.
            length (`int`): committed tokens of the longest row of both.
        """
        self._project_pending()
        count = other.cache.rows
        self.cache.append_rows(other.cache, length)
        # Context that is still queued here has nothing for the new rows.
        self._pending = [
            (torch.cat([states, states.new_zeros(count, *states.shape[1:])]), [*first, *[0] * count], [*counts, *[0] * count])
            for states, first, counts in self._pending
        ]
        # Until there is a confidence from two rounds ago, a new row is taken to be like the others.
        self._older_confidence = [
            torch.cat([confidence, confidence.mean(dim=0, keepdim=True).expand(count, -1)])
            for confidence in self._older_confidence
        ]

    def decode_with(self, processors: RowProcessors, do_sample: bool) -> None:
        """Sets how the coming rounds are decoded.

        Args:
            processors (`RowProcessors`): logits processors of the rows.
            do_sample (`bool`): whether any row samples, on which the default schedule depends.
        """
        self.processors, self.do_sample = processors, do_sample
        self.mode = self._choose_mode()
        if self.mode == "full":
            self.profitability = None
        elif self.profitability is None or self.profitability.profile is not self.drafter.load_profile:
            self.profitability = Profitability(self.drafter.load_profile)  # it has been given another one meanwhile

    # ---- drafting ----

    def propose(self, sequences: list[Tensor], rows: list[int], slots: list[int], limits: list[int]) -> CandidateBlock | None:
        """Drafts and schedules a block for every row.

        Args:
            sequences (list of R `torch.LongTensor`s, 1-D): tokens of each row; the last one is the anchor.
            rows (`list[int]`): number of each row in the batch of the call.
            slots (`list[int]`): slot of each anchor.
            limits (`list[int]`): longest draft each row has room for.

        Returns:
            [`CandidateBlock`] or `None` when this round is better spent without a draft.
        """
        limits = [min(limit, self.block_limit) for limit in limits]
        longest = max(limits)
        pauses = self.profitability is not None and longest > 0 and not self.profitability.should_draft(len(sequences))
        self._drafted = longest > 0 and not pauses
        self._promised = 0.0
        if not self._drafted:
            return None
        statistics = self.statistics
        statistics.drafts += 1
        statistics.drafted += sum(limits)
        with statistics.timed("draft"):
            hidden, base_logits = self._parallel_stage(sequences, slots)

        lengths, confidence = torch.tensor(limits), None
        if self.mode in ("presampled", "history"):
            with statistics.timed("schedule"):
                confidence = self._discounted(self._blind_confidence(sequences, hidden, base_logits))
                lengths = self._schedule(confidence, lengths)
                longest = int(lengths.max())
        with statistics.timed("head"):
            tokens, logits, token_ids, embeddings, log_odds, usable = self._sequential_stage(
                sequences, rows, hidden, base_logits, longest
            )
            lengths = lengths.minimum(usable)
        listened = self.drafter.on_round is not None
        if confidence is None and self.drafter.confidence_head is not None and (self.mode != "full" or listened):
            with statistics.timed("schedule"):
                confidence = self._confidence(hidden[:, :longest], embeddings, log_odds)
                if self.mode != "full":
                    confidence = self._discounted(confidence)
                    lengths = self._schedule(confidence, lengths)
        longest = int(lengths.max())
        base = base_logits[:, :longest].argmax(-1) if listened else None
        if base is not None and (to_target := self.drafter.draft_token_ids) is not None:
            base = to_target[base]
        laws = None if logits is None else logits[:, :longest]
        return CandidateBlock(tokens[:, :longest], lengths, laws, token_ids, confidence, base, log_odds)

    def _parallel_stage(self, sequences: list[Tensor], slots: list[int]) -> tuple[Tensor, Tensor]:
        """Draft states `(R, K, D)` and base logits `(R, K, Vd)` behind all context observed so far."""
        hidden = self._draft_states(sequences, slots)
        return hidden, self.drafter.base_logits(hidden)

    def _draft_states(self, sequences: list[Tensor], slots: list[int]) -> Tensor:
        """Draft states `(R, K, D)`; the queued context goes into the cache on the way."""
        config, device, layout = self.drafter.config, self.drafter.device, self.layout
        block = torch.full((len(sequences), config.block_size), config.mask_token_id, dtype=torch.long, device=device)
        block[:, 0] = torch.stack([ids[-1] for ids in sequences]).to(device)
        block_slots = slot_ranges(slots, config.block_size, device)

        self._project_pending()
        none = torch.empty(len(sequences), 0, config.hidden_size, dtype=self.drafter.dtype, device=device)
        context = torch.cat([none, *(states for states, _, _ in self._pending)], dim=1)  # (R, C, D)
        length = max(slots) + config.block_size - self._first_slot
        pieces = []
        for states, first_slots, counts in self._pending:
            piece = slot_ranges(first_slots, states.shape[1], device)
            if min(counts) < states.shape[1]:
                # Rows that kept fewer states than the longest one send the rest to the slot behind everything.
                offsets, count = piece - piece[:, :1], torch.tensor(counts, device=device)[:, None]
                piece = torch.where(offsets < count, piece, self._first_slot + length)
            pieces.append(piece)
        source_slots = torch.cat([*pieces, block_slots], dim=1)  # (R, C + Q)
        if len(slots) == 1:
            self.cache.place(slots[0] - context.shape[1] - self._first_slot, source_slots.shape[1])
        else:
            self.cache.place_rows(source_slots - self._first_slot, length)
        self._pending, self._projected = [], 0

        hidden = self.drafter(
            self.drafter.embed(block),
            context,
            layout.text_positions(source_slots).to(device),
            self._block_mask(block_slots, length),
            self.cache,
        ).last_hidden_state
        if not config.sample_from_anchor:
            hidden = hidden[:, 1:]
        return hidden

    def _block_mask(self, block_slots: Tensor, length: int) -> object:
        """What a block sees: all context and itself, minus padding, other rows' longer reach and a window's far side."""
        config, layout = self.drafter.config, self.layout
        window = config.sliding_window
        if len(block_slots) == 1 and layout.padded is None and (window is None or length <= window):
            return None
        slots = torch.arange(self._first_slot, self._first_slot + length, device=block_slots.device)
        visible = (slots <= block_slots[:, -1:])[:, None]  # (R, 1, S)
        if len(block_slots) > 1:  # told apart from a row's own mask, which flash attention takes for that of its last queries
            visible = visible.expand(-1, block_slots.shape[1], -1)
        if window is not None:
            visible = visible & (slots > block_slots[:, :, None] - window)  # (R, Q, S)
        visible = layout.hide_padding(visible.clone(), self._first_slot)
        return format_mask(visible[:, None], self.drafter.config._attn_implementation, self.drafter.dtype)

    def _sequential_stage(
        self, sequences: list[Tensor], rows: list[int], hidden: Tensor, base_logits: Tensor, longest: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """x_k ~ softmax(U_k + B_k(x_<k, ·)) for k = 1 … longest.

        Returns:
            tokens `(R, L)`; when sampling, the processed logits `(R, L, ·)` and the token ids they stand for; W1 of each
            position's predecessor `(R, L, r)`; in greedy decoding the tokens' log-odds `(R, L)`, where anyone reads
            them; and how many of the tokens are drafts `(R,)`, on the host: where the
            processors ban all that there is to choose from, or there is NaN where a law is needed, a row's draft ends; and
            behind an end token, where processors read the text.
        """
        head, to_target = self.drafter.markov_head, self.drafter.draft_token_ids
        widen = to_target is not None and bool(self.processors) and not self.processors.scores_only
        previous = torch.stack([ids[-1] for ids in sequences]).to(hidden.device)
        usable = torch.ones_like(previous, dtype=torch.bool)
        counts = torch.zeros_like(previous)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        embeddings: list[Tensor] = []
        log_odds: list[Tensor] = []
        reads_log_odds = not self.do_sample and (self._weighs_log_odds or self.drafter.on_round is not None)
        state = None
        bias = None if head is None else self._head_bias(base_logits[:, :longest])
        for k in range(longest):
            logits = base_logits[:, k]
            if bias is not None:
                embedding = head.markov_w1(previous)
                latent, state = head.latent(embedding, hidden[:, k], state)
                logits = bias(k, latent)
                embeddings.append(embedding)
            if self.processors:
                if widen:  # these processors index by token
                    wide = logits.new_full((len(logits), self.drafter.config.vocab_size), -torch.inf)
                    logits = wide.index_copy_(1, to_target, logits.float())
                prefixes = []
                if not self.processors.scores_only:
                    drafted = torch.stack(tokens, dim=1) if tokens else previous.new_empty(len(sequences), 0)
                    prefixes = [  # a draft that has ended may hold what the processors have banned
                        torch.cat([ids, new.to(ids.device)]) if goes_on else ids
                        for ids, new, goes_on in zip(sequences, drafted, usable.tolist(), strict=True)
                    ]
                try:
                    logits = self.processors(logits.float().to(sequences[0].device), prefixes, rows).to(hidden.device)
                except ValueError:  # of a warper that wants a law, from scores of which none is left
                    logits = torch.full_like(logits, -torch.inf)
            if self.processors or self.do_sample:
                usable = usable & logits.amax(-1).isfinite()
            counts += usable
            if self.do_sample:
                laws.append(torch.where(usable[:, None], logits.float(), 0.0))
                choice = torch.multinomial(laws[-1].softmax(-1), 1)[:, 0]
            else:
                choice = logits.argmax(-1)
                if reads_log_odds:
                    probability = (logits.amax(-1).float() - logits.float().logsumexp(-1)).exp()
                    # NaN is of a row whose draft has ended, with nothing to choose from; a float32 next to 1 says no more.
                    log_odds.append(probability.nan_to_num(nan=0.0).logit(eps=1e-6))
            previous = choice if to_target is None or widen else to_target[choice]
            tokens.append(previous)
            if self.processors and not self.processors.scores_only:
                goes_on = [not self.processors.ends(row, token) for row, token in zip(rows, previous.tolist(), strict=True)]
                usable = usable & torch.tensor(goes_on, device=usable.device)
        none = previous.new_empty(len(sequences), 0)
        return (
            torch.stack(tokens, dim=1) if tokens else none,
            torch.stack(laws, dim=1) if laws else None,
            None if widen else to_target,
            torch.stack(embeddings, dim=1) if embeddings else None,
            torch.stack(log_odds, dim=1) if log_odds else None,
            counts.cpu(),
        )

    def _head_bias(self, base_logits: Tensor) -> Callable[[int, Tensor], Tensor]:
        """What turns position k and its z `(R, r)` into biased logits `(R, Vd)`, from base logits `(R, L, Vd)`.

        With `head_candidates`, only the likeliest base tokens get their bias, from their own rows of W2, and all others are
        ruled out. The laws reported are those of the drawing either way.
        """
        w2, count = self.drafter.markov_head.markov_w2, self.drafter.head_candidates
        if count is None or count >= base_logits.shape[-1]:
            return lambda k, latent: base_logits[:, k] + w2(latent)
        values, candidates = base_logits.topk(count, dim=-1)  # (R, L, C)
        w2_rows = w2.weight[candidates]  # (R, L, C, r)

        def bias(k: int, latent: Tensor) -> Tensor:
            logits = values[:, k] + (w2_rows[:, k] @ latent[..., None])[..., 0].to(values.dtype)
            return torch.full_like(base_logits[:, k], -torch.inf).scatter_(1, candidates[:, k], logits)

        return bias

    # ---- scheduling ----

    def _blind_confidence(self, sequences: list[Tensor], hidden: Tensor, base_logits: Tensor) -> Tensor:
        """Confidences `(R, K)` that depend on no sampled token, so that any search over them is exact.

        The head is fed the most likely predecessor under the base logits; without a head, past acceptance stands in.
        """
        if self.mode == "history":
            rates = self.profitability.acceptance_rates(self.statistics)
            return hidden.new_tensor(rates).expand(len(hidden), -1)
        embeddings = None
        if self.drafter.confidence_head.with_markov:
            likely = base_logits[:, :-1].argmax(-1)
            if (to_target := self.drafter.draft_token_ids) is not None:
                likely = to_target[likely]
            anchor = torch.stack([ids[-1:] for ids in sequences]).to(likely.device)
            embeddings = self.drafter.markov_head.markov_w1(torch.cat([anchor, likely], dim=1))
        return self._confidence(hidden, embeddings)

    def _confidence(self, hidden: Tensor, embeddings: Tensor | None, log_odds: Tensor | None = None) -> Tensor:
        logits = self.drafter.confidence_head(hidden, embeddings)
        return self.drafter.calibrated(logits, greedy=not self.do_sample, log_odds=log_odds)

    def _discounted(self, confidence: Tensor) -> Tensor:
        """Confidences `(R, K)` less what earlier rounds promised and did not keep; a threshold is the user's own word."""
        if self.mode == "threshold":
            return confidence
        first = confidence[:, :1] * self.profitability.discount  # c_1 is a factor of every survival a_k
        return torch.cat([first, confidence[:, 1:]], dim=1)

    def _schedule(self, confidence: Tensor, room: Tensor) -> Tensor:
        """Lengths `(R,)` by the mode of this call, at most `room` `(R,)`. On the host, which needs them anyway."""
        drafter, profile = self.drafter, self.drafter.load_profile
        # A token without room brings nothing, and must not take the place of another row's.
        places = torch.arange(confidence.shape[1])
        confidence = confidence.cpu().masked_fill(places >= room[:, None], 0.0)
        older = None
        if self.mode == "two_step":
            rounds, self._older_confidence = self._older_confidence, [*self._older_confidence[-1:], confidence]
            older = rounds[0] if len(rounds) == 2 else None
        lengths = scheduling.schedule(
            self.mode, confidence, profile, older, drafter.confidence_threshold, on=drafter.threshold_on
        )
        lengths = lengths.minimum(room)
        self._promised = float((scheduling.survival(confidence) * (places < lengths[:, None])).sum())
        return lengths

    def book(
        self, scheduled: list[int], accepted: list[int], committed: list[int | None], room: list[int] | None = None
    ) -> None:
        """Enters a verified round in the statistics, in a live load profile and in the account of whether drafting pays.

        Args:
            scheduled (list of R `int`s): draft tokens of each row that were verified.
            accepted (list of R `int`s): how many of them the target agreed with.
            committed (list of R `int`s or `None`): by how many tokens the row has grown; `None` if it had finished before.
            room (list of R `int`s, *optional*): by how many it may still grow, 0 once it has ended; only where no other row
                takes its place.
        """
        rows, verified = len(scheduled), sum(scheduled)
        if rows > 1 and not self.packs:
            verified = rows * max(scheduled)
        self.statistics.rounds += 1
        for length, agreed, new in zip(scheduled, accepted, committed, strict=True):
            if new is not None:
                self.statistics.count(length, agreed, new)
        self._feed_profile(rows, verified)
        going = [place for place, new in enumerate(committed) if new is not None]
        if self._drafted and going and self.profitability is not None:
            grown = [committed[place] for place in going]
            left = None if room is None else [room[place] for place in going]
            self.profitability.record(rows, verified, sum(accepted), grown, self._promised, left)

    def _feed_profile(self, rows: int, verified: int) -> None:
        """Tells a live load profile what the round took; the first one, whose beginning nobody has noted, is left out."""
        profile, before, self._spent = self.drafter.load_profile, self._spent, None
        if profile is None or not profile.is_live:
            return
        self._spent = self.statistics.spent("draft", "head"), self.statistics.spent("verify")
        if before is not None:
            drafting, verifying = (now - then for now, then in zip(self._spent, before, strict=True))
            profile.record(rows + verified, rows, verifying, drafting if self._drafted else None)

    # ---- the host's own loop ----

    def get_candidates(  # type: ignore[override]  # the host's loop passes these keywords
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: ModelOutput | None = None,
        is_first_iteration: bool = False,
        n_last_matches: int = 0,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """The contract of `CandidateGenerator`, for one row; see transformers' `_assisted_decoding`.

        Returns:
            `tuple[torch.LongTensor, torch.Tensor | None]`: prompt and candidates `(1, S + ℓ)`, and when sampling the logits
            `(1, ℓ, V)` of the laws the candidates were drawn from.
        """
        if is_first_iteration:  # the target's prefill comes first
            return input_ids, None
        positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        if positions is None:  # a target that takes none counts its tokens
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        total = positions.shape[-1]  # everything in the cache, and the anchor
        states = model_outputs.hidden_states
        count = n_last_matches + 1
        if self.layout is None:
            count = states[self.captured_states[0]].shape[1]
            self.start(RowLayout(positions[..., :-1], None if mask is None else mask[:, :-1]), total - 1 - count)
        self.observe(states, [total - 1 - count], [count])
        room = self.max_length - input_ids.shape[1] - 1
        block = self.propose([input_ids[0]], [0], [total - 1], [room])
        self._scheduled = 0 if block is None else block.tokens.shape[1]
        if block is None or block.tokens.shape[1] == 0:
            return input_ids, None
        candidates = torch.cat([input_ids, block.tokens.to(input_ids.device)], dim=1)
        logits = block.logits
        if logits is not None and block.token_ids is not None:
            wide = logits.new_full((*logits.shape[:2], self.drafter.config.vocab_size), -torch.inf)
            logits = wide.index_copy_(2, block.token_ids, logits)
        return candidates, logits

    @property
    def num_drafting_tokens(self) -> int:
        """Longest draft of a round; the host asks (from 5.25 on) how many steps a cache may have to take back."""
        return self.block_limit

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int) -> None:
        """Books the round; there is nothing to adapt, since every round is scheduled anew."""
        if self.layout is not None:  # the first call follows the prefill
            matches = int(num_matches)
            self.book([self._scheduled], [matches], [matches + 1])
