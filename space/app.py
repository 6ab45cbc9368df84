"""DSpark on stage: a race, the load slider, the inside of a block, and the lesson about looking too early.

Run it with `make space`, or `python space/app.py`. The embedded pair is shown unless `TARGET_MODEL` and `DRAFTER_MODEL` name
another one.
"""

from __future__ import annotations

import json
from pathlib import Path

import block
import causality
import gradio as gr
import load
import race
from pair import load_pair
from stage import PLACES, Stage
from visitors import PROMPT_LIMIT, TOKEN_LIMIT, Refused, Visitor, check_text, escape, notice

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
PROMPTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the sum of the even numbers in a list.",
)
# Whichever tab asks. A visitor may click again at any time: the latest click counts, see `Visitor`.
MODELS = {"concurrency_id": "models", "concurrency_limit": PLACES, "trigger_mode": "multiple", "show_progress": "hidden"}
CLICKED = "(_, ...rest) => [performance.now() / 1000, ...rest]"  # fills the first input with the time
WAITING = f"() => {json.dumps(notice('Waiting for the first pass …'))}"  # said by the page itself, at once
LEGEND = (
    '<p class="hint legend"><span class="accepted">accepted draft</span> <span class="rejected plainly">rejected draft</span> '
    '<span class="own">the target\'s own</span></p>'
)


def build(stage: Stage, prompts: tuple[str, ...] = PROMPTS) -> gr.Blocks:
    """The page.

    Args:
        stage ([`Stage`]): runs the models.
        prompts (tuple of `str`): examples to offer; the first one gives the confidences for the load slider.
    """
    pair = stage.pair
    *_, passes = block.record(stage, prompts[0])
    blocks = load.blocks_to_choose(passes, pair.drafter.config.num_draft_tokens)

    def run_race(clicked, visitor, prompt, length, mode, verify):
        columns = "", ""
        visitor.start(clicked)
        try:
            prompt, note = check_text(prompt, pair.tokenizer)
            states = race.run(stage, prompt, length, mode == "sampled", verify == "every drafted token")
            for state in visitor.watch(clicked, states):
                columns = race.column(state, "plain"), race.column(state, "dspark")
                yield *columns, notice(note) + race.verdict(state)
        except Refused as refusal:
            yield *columns, notice(str(refusal), refusal.kind)

    def look_inside(clicked, visitor, prompt):
        page = ""
        visitor.start(clicked)
        try:
            prompt, note = check_text(prompt, pair.tokenizer)
            for passes in visitor.watch(clicked, block.record(stage, prompt)):
                page = block.page(pair, passes)
                yield page, notice(note)
        except Refused as refusal:
            yield page, notice(str(refusal), refusal.kind)

    def stop(clicked, visitor):
        visitor.stopped = max(visitor.stopped, clicked)
        return notice("Stopped.")

    def look_up(text):
        try:
            text, note = check_text(text, pair.tokenizer, TOKEN_LIMIT)
            return notice(note) + stage.call(block.habits_page, pair, text)
        except Refused as refusal:
            return notice(str(refusal), refusal.kind)

    def under_load(step, name):
        return load.page(pair.profile, blocks[name], step)

    def lesson(seed):
        return stage.call(causality.page, causality.DRAWS, seed), seed + 1

    with gr.Blocks(title="DSpark", analytics_enabled=False) as demo:
        gr.HTML(
            "<h1>DSpark</h1><p>A small drafter guesses the next few tokens, the target checks them all in one pass. The text "
            "stays the target's own; only the number of passes changes.</p>"
            f'<p class="hint">On stage: {escape(pair.name)}, drafts of {pair.drafter.config.num_draft_tokens} tokens, on '
            f"{'a GPU' if pair.target.device.type == 'cuda' else 'the processor'}. Up to {PLACES} visitors share it; "
            "others wait in line. What you type is not kept.</p>"
        )
        clicked = gr.Number(visible=False)
        racer, looker = gr.State(Visitor()), gr.State(Visitor())
        with gr.Tab("Race"):
            prompt = gr.Textbox(prompts[0], label="Prompt", lines=2, max_lines=6,
                                info=f"Up to {PROMPT_LIMIT} characters.", elem_id="race-prompt")  # fmt: skip
            gr.Examples([[text] for text in prompts], prompt, label="Try one of these")
            with gr.Row():
                length = gr.Slider(8, race.LENGTH_LIMIT, 48, step=8, label="New tokens, at most")
                mode = gr.Radio(["greedy", "sampled"], value="greedy", label="Decoding")
                verify = gr.Radio(["what the scheduler picks", "every drafted token"], value="what the scheduler picks",
                                  label="Verify")  # fmt: skip
            with gr.Row():
                start = gr.Button("Start the race", variant="primary", elem_id="race-start")
                end = gr.Button("Stop", elem_id="race-stop")
            verdict = gr.HTML(elem_id="race-verdict")
            with gr.Row(equal_height=False):
                with gr.Column(min_width=300):  # side by side, or one above the other on a phone
                    plain = gr.HTML(elem_id="race-plain")
                with gr.Column(min_width=300):
                    dspark = gr.HTML(elem_id="race-dspark")
            gr.HTML(
                LEGEND
                + '<p class="hint">Both run on the same machine, one pass of the target at a time; whichever has used less '
                "time goes next, and each has its own clock. So neither slows the other, and the page shows both at the same "
                "moment of their race, at half speed. Visitors at the same time share the passes of each side, and with them "
                "one budget of tokens to verify; more of them make everybody slower.</p>"
            )
            starts = [start.click, prompt.submit]
            gr.on(starts, None, None, verdict, js=WAITING, show_progress="hidden")
            inputs = [clicked, racer, prompt, length, mode, verify]
            gr.on(starts, run_race, inputs, [plain, dspark, verdict], js=CLICKED, **MODELS)
            end.click(stop, [clicked, racer], verdict, js=CLICKED, queue=False, show_progress="hidden")

        with gr.Tab("Load"):
            gr.HTML(
                "<p>At night the machine is idle and checking five tokens costs little more than one. On Saturday every token "
                "checked for you is one less for somebody else. Move the slider and see how many are still worth it.</p>"
            )
            step = gr.Slider(0, load.STEPS - 1, 0, step=1, label="Quiet night → Saturday rush", elem_id="load-step",
                             info="Each step doubles the requests at once: 1, 2, 4 … 256.")  # fmt: skip
            which = gr.Radio(list(blocks), value=load.IMAGINED, label="Whose confidences?")
            loaded = gr.HTML(under_load(0, load.IMAGINED), elem_id="load-page")
            for control in (step, which):
                control.change(under_load, [step, which], loaded, show_progress="hidden", trigger_mode="always_last")

        with gr.Tab("Block"):
            gr.HTML(
                "<p>All positions of a block are guessed at once, each blind to the others. The sequential (Markov) head then "
                "goes through them from left to right and corrects by habit: which token tends to follow which. A confidence "
                "says how likely each survives, and the scheduler cuts. Here everything is checked all the same, to see who "
                "was right.</p>"
            )
            inside_prompt = gr.Textbox(prompts[0], label="Prompt", lines=2, max_lines=6, elem_id="block-prompt",
                                       info=f"Up to {PROMPT_LIMIT} characters.")  # fmt: skip
            with gr.Row():
                inside_start = gr.Button("Look inside", variant="primary", elem_id="block-start")
                inside_end = gr.Button("Stop", elem_id="block-stop")
            inside_note = gr.HTML(elem_id="block-note")
            inside = gr.HTML(elem_id="block-page")
            starts = [inside_start.click, inside_prompt.submit]
            gr.on(starts, None, None, inside_note, js=WAITING, show_progress="hidden")
            gr.on(starts, look_inside, [clicked, looker, inside_prompt], [inside, inside_note], js=CLICKED, **MODELS)
            inside_end.click(stop, [clicked, looker], inside_note, js=CLICKED, queue=False, show_progress="hidden")

            gr.HTML(
                "<h3>The table of habits</h3><p>Type a token; a leading space counts. Of several tokens the last is taken.</p>"
            )
            token = gr.Textbox(label="Token", elem_id="habit-token", info=f"Up to {TOKEN_LIMIT} characters.")
            token_start = gr.Button("Show its habits", elem_id="habit-start")
            habit_page = gr.HTML(elem_id="habit-page")
            for trigger in (token_start.click, token.submit):
                trigger(look_up, token, habit_page, show_progress="hidden")

        with gr.Tab("Peeking"):
            gr.HTML(
                "<p>The scheduler may shorten a draft as it likes, if it decides about a token without knowing it. A toy world "
                "with two tokens shows what happens otherwise. The target says A with 0.7 and B with 0.3; the drafter tosses a "
                "fair coin; the confidence of the second token gives away the first.</p>"
            )
            seed = gr.State(1)
            draw = gr.Button(f"Draw {causality.DRAWS:,} times again", variant="primary", elem_id="causality-draw")
            drawn = gr.HTML(causality.page(), elem_id="causality-page")
            draw.click(lesson, seed, [drawn, seed], show_progress="hidden")
    return demo.queue(max_size=32, api_open=False)


def launch(demo: gr.Blocks, **options):
    """Serves the page in its own look; `options` are those of `gr.Blocks.launch`."""
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])  # nothing from afar
    theme.set(body_text_color_subdued="*neutral_600", block_info_text_color="*neutral_600")  # else too pale on white
    for shade in ("", "_dark"):  # and white on the buttons
        fills = {f"button_primary_background_fill{hover}{shade}": f"*primary_{n}" for hover, n in (("", 700), ("_hover", 800))}
        theme.set(**fills)
    # Without `run_history=False`, Gradio keeps every prompt in the visitor's browser.
    return demo.launch(css=CSS, theme=theme, footer_links=[], ssr_mode=False, run_history=False, **options)


if __name__ == "__main__":
    launch(build(Stage(load_pair())))
