"""The page in a browser: no error, no request, hover, keyboard, phone width, dark, and without JavaScript."""

import pytest

from helpers.chromium import BINARY, Chromium
from helpers.run_folders import dense_and_moe, event, experts, train_record, write_run
from moe_exp.host import quantities
from moe_exp.report.page import write_report

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed (apt-get install chromium)")


TITLE = "<script>document.title = 'run'</script>"
LOSS = "Training loss, nats per token"
ITERATIONS = "document.querySelector('input[value=iteration]').click()"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = Chromium(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    write_report(dense_and_moe(folder), folder / "report.html", title=TITLE)
    return folder / "report.html"


def charts(browser) -> dict:
    """Title of each chart that is shown to the text of its line."""
    shown = "Report.charts.filter(c => !c.box.hidden)"
    return dict(browser(f"{shown}.map(c => [c.caption(), c.readout.textContent])"))


def unfold(browser) -> None:
    """Opens all groups, which draws their charts."""
    browser("document.querySelectorAll('details.group').forEach(group => { group.open = true; })")
    browser("new Promise(done => setTimeout(done, 100))")


def choose(browser, name: str, value: float, event: str = "input") -> None:
    """Sets an input as a user does."""
    browser(f"box = document.getElementById('{name}'); box.value = {value}")
    browser(f"box.dispatchEvent(new Event('{event}'))")


def colored(browser, selector: str) -> int:
    """How many colours a canvas has."""
    data = f"document.querySelector('{selector}')"
    pixels = f"{data}.getContext('2d').getImageData(0, 0, {data}.width, {data}.height).data.buffer"
    return browser(f"new Set(new Uint32Array({pixels})).size")


def test_it_opens_from_the_disk_without_an_error_or_a_request(browser, page):
    browser.open(page)
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]
    assert browser("document.title") == browser("document.querySelector('h1').textContent") == TITLE
    assert browser("document.querySelector('[data-chart=grad_norm] canvas')") is None  # folded: not drawn
    unfold(browser)
    shown = charts(browser)
    assert shown[LOSS].startswith("latest")
    names = {"Validation perplexity", "Gradient norm before clipping", "Training loss relative to dense"}
    assert names | {"Dead experts (below 1% of the fair share), mean over layers"} <= set(shown)
    assert "Router weight of the first choice by layer" not in shown  # not recorded
    note = "document.querySelector('#training .hidden-charts')"
    assert "4 constant charts hidden: Learning rate (0.001), " in browser(f"{note}.textContent")
    browser(f"{note}.querySelector('button').click()")
    assert {"Learning rate", "Peak memory per rank"} <= set(charts(browser))
    assert all(colored(browser, f'[data-chart="{name}"] canvas') > 5 for name in ("loss", "ppl", "grad_norm"))


def test_every_axis_and_scale(browser, page):
    browser.open(page)
    axes = {"consumed_flops": "FLOPs", "training_seconds": "seconds", "iteration": "iteration"}
    for axis, unit in axes.items():
        browser(f"document.querySelector('input[value={axis}]').click()")
        assert browser("Report.charts[0].unit") == unit
    for name in ("log-x", "log-y"):
        browser(f"document.getElementById('{name}').click()")
    assert colored(browser, '[data-chart="loss"] canvas') > 5
    # a gap stays one
    assert browser("Report.charts[0].plot.data.slice(1).some(values => values[10] === null)")
    note = browser("Report.charts[0].note.textContent")
    assert "× marks" in note and "┆ marks" in note and note.endswith("experts: resume after iteration 20.")
    assert browser.problems == []


def test_hover_and_arrow_keys_tell_the_values(browser, page):
    browser.open(page)
    browser(ITERATIONS)
    choose(browser, "smoothing", 0)
    browser("Report.charts[0].place.scrollIntoView({block: 'center'}); Report.charts[0].place.focus()")
    browser.press("End")
    assert charts(browser)[LOSS] == "iteration 40dense 4.0000experts 3.0000"
    browser.press("Home")
    browser.press("ArrowRight")
    assert charts(browser)[LOSS] == "iteration 2dense 7.8000experts 7.7500"
    browser.press("Escape")
    place = "Report.charts[0].plot.over.getBoundingClientRect()"
    x, y, width = browser(f"(r => [r.left, r.top + 50, r.width])({place})")
    browser.move(x + width / 2, y)
    assert charts(browser)[LOSS].startswith("iteration 2")


def test_smoothing_by_a_worked_example(browser, page):
    browser.open(page)
    # TensorBoard's: last = 0.5*last + 0.5*value, divided by 1 - 0.5^n. A gap stays one.
    assert browser("Report.smoothed([4, null, 1, 6], 0.5)") == [4, None, 2, pytest.approx(3.75 / 0.875)]
    assert browser("Report.smoothed([4, null, 1], 0.5)") == [4, None, 2]
    assert browser("Report.smoothed([4, 4, 4], 0.9).map(value => value.toFixed(6))") == ["4.000000"] * 3
    # Without a cursor the line shows the latest value itself, however smooth the curve is.
    choose(browser, "smoothing", 0.99)
    assert charts(browser)[LOSS] == "latestdense 4.0000experts 3.0000"


def test_seeds_are_a_band_and_the_difference_a_curve(browser, tmp_path):
    losses = {"dense": (5, 4), "dense_2": (7, 6), "moe": (4, 2), "moe_2": (6, 5)}
    paths = []
    for name, values in losses.items():
        records = [train_record(index, loss) for index, loss in enumerate(values, start=1)]
        seed, use_moe = (2 if "_2" in name else 1), "moe" in name
        paths.append(write_run(tmp_path / name, records, seed=seed, use_moe=use_moe))
    write_report(paths, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    assert charts(browser)[LOSS] == "latestdense (2 seeds) 5.0000moe (2 seeds) 3.5000"
    band = "(one => [one.label, one.y, one.low, one.high])"
    assert browser(f"Report.charts[0].series().map({band})") == [
        ["dense (2 seeds)", [6, 5], [5, 4], [7, 6]],
        ["moe (2 seeds)", [5, 3.5], [4, 2], [6, 5]],
    ]
    # Seed by seed: 4 - 5 and 6 - 7, then 2 - 4 and 5 - 6.
    assert browser(f"Report.charts.find(c => c.box.dataset.chart == 'minus').series().map({band})") == [
        ["moe (2 seeds)", [-1, -1.5], [-1, -2], [-1, -1]]
    ]
    browser("document.getElementById('bands').click()")
    assert browser("Report.charts[0].series().map(one => one.label)") == list(losses)
    # One by one: the second dense run minus the baseline, the others minus that of their own seed.
    minus = browser("Report.charts.find(c => c.box.dataset.chart == 'minus').series().map(one => one.y)")
    assert minus == [[2, 2], [-1, -2], [-1, -1]]
    choose(browser, "baseline", 3, "change")
    assert "Training loss relative to moe_2" in charts(browser)
    # Records of the baseline at other places: 3 lies halfway between 4 and 2.
    assert browser("Report.interpolated([2, 4], [4, 2], [1, 2, 3, 4, 5])") == [None, 4, 3, 2, None]
    assert browser.problems == []


def test_marks_of_several_runs_and_seeds_are_named(browser, tmp_path):
    paths = []
    for name, use_moe in (("dense", False), ("moe", True), ("moe_2", True)):
        records = [train_record(index, 5 - index / 10) for index in range(1, 21)]
        at = [event("start", 0, "10:00:00"), event("resume", 5, "10:01:00")]
        if use_moe:  # the second seed was also resumed
            resume = at.pop()
            at.append(event("data_stage", 11, "10:01:00", stage=1, train_data="web", seq_len=64))
            at += [resume | {"iteration": 10}] * (name == "moe_2")
        seed = 2 if name == "moe_2" else 1
        paths.append(write_run(tmp_path / name, [*at, *records], use_moe=use_moe, seed=seed))
    write_report(paths, tmp_path / "report.html")
    browser.open(tmp_path / "report.html")
    note = browser("Report.charts[0].note.textContent")
    assert "dense: resume after iteration 5. moe (2 seeds): " in note
    assert "data stage 1 from iteration 11: web, SEQ_LEN 64; resume after iteration 10. " in note
    assert browser("Report.charts[0].series().map(one => one.changes.iteration)") == [[5], [10, 10]]
    assert browser.problems == []


def test_the_tools_of_a_chart(browser, page):
    browser.open(page)
    browser(f"{ITERATIONS}; chart = Report.charts[0]")
    lines = browser("chart.csv().split('\\n').slice(0, 2)")
    assert lines == ["run,iteration,value,smoothed,low,high", "dense,1,7.9,7.9,,"]
    assert browser("Report.csvText([['a, b', 'c\"d', null]])") == '"a, b","c""d",\n'
    assert browser("chart.png().width > chart.plot.ctx.canvas.width")
    assert browser("chart.png().toDataURL().slice(0, 14)") == "data:image/png"
    heat = "document.querySelector('#heat-now .tools')"
    assert browser(f"{heat}.querySelectorAll('button').length") == 3
    labels = "[...chart.box.querySelectorAll('.tools summary, .tools input')].map(one => one.ariaLabel)"
    assert browser(labels) == [f"{what} of the chart {LOSS}" for what in ("Tools", "Lowest y", "Highest y")]
    browser("input = chart.box.querySelector('.tools input'); input.value = 2.5")
    browser("input.dispatchEvent(new Event('input'))")
    assert browser("chart.plot.scales.y.min") == 2.5
    browser("full = chart.box.querySelector('.tools [aria-pressed]')")
    browser("full.click()")
    assert browser("chart.box.getBoundingClientRect().width == innerWidth && chart.plot.height > 400")
    browser.press("Escape")
    assert browser("chart.plot.height") == 340 and browser.problems == []


def test_the_page_writes_numbers_as_the_terminal_does(browser, page):
    browser.open(page)
    numbers = [0, 1, 12.345, 59, 119.96, 200, 999.96, 16384, 100_000, 999_960, 999.5e6, 3.4567e9, 2.5e18]
    numbers += [3e-6]
    names = ("count", "flops", "digits", "bytes", "rate", "loss")
    writers = {name: getattr(quantities, f"{name}_text") for name in names}
    writers["duration"] = quantities.duration
    for name, write in writers.items():
        assert browser(f"{numbers}.map(value => Report.{name}(value))") == list(map(write, numbers))


def test_a_run_can_be_hidden(browser, page):
    browser.open(page)
    browser("document.querySelectorAll('#runs button')[1].click()")
    assert "experts" not in charts(browser)[LOSS] and "dense" in charts(browser)[LOSS]


def test_the_heatmap_follows_its_slider_and_the_keyboard(browser, page):
    browser.open(page)
    text = "document.querySelector('#heat-now .readout').textContent"
    assert browser(text) == "iteration 40, layer 1, expert 0: 1.88 of its fair share (46.9% of the slots)"
    browser("document.querySelector('#heat-now canvas').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        browser.press(key)
    dead = "iteration 40, layer 2, expert 3: 0.00 of its fair share (0.0% of the slots, dead)"
    assert browser(text) == dead
    choose(browser, "expert-time", 0)
    assert browser(text) == "iteration 1, layer 2, expert 3: 1.00 of its fair share (25.0% of the slots)"
    browser("document.getElementById('expert-table-box').open = true")
    browser("new Promise(done => setTimeout(done, 200))")
    assert browser("document.querySelectorAll('#expert-table td').length") == 8
    assert colored(browser, "#heat-over canvas") >= 4 and browser.problems == []


def test_the_cost_of_another_loss(browser, page):
    browser.open(page)
    choose(browser, "target-loss", 7)
    selected = "document.querySelectorAll('tr[data-run] td[data-axis=iteration]')"
    cells = f"[...{selected}].map(cell => cell.textContent)"
    assert browser(cells) == ["11", "9"]
    choose(browser, "target-loss", 1)
    assert browser(cells) == ["not reached", "not reached"]


@pytest.mark.parametrize("scripts", [True, False], ids=["script", "no-script"])
def test_a_phone(browser, page, scripts):
    browser.open(page, width=390, height=844, scripts=scripts)
    assert browser("document.documentElement.scrollWidth") == 390
    if scripts:
        unfold(browser)
        assert browser("document.documentElement.scrollWidth") == 390
        # A table that is wider than its frame says so, until its end is reached.
        box = "document.querySelector('#cost .scroll')"
        state = f"[{box}.previousElementSibling.hidden, {box}.hasAttribute('data-more')]"
        assert browser(state) == [False, True]
        browser(f"{box}.scrollLeft = 1000; new Promise(done => setTimeout(done, 100))")
        assert browser(state) == [False, False]
    tables = browser("[...document.querySelectorAll('.scroll')].map(box => box.getAttribute('aria-label'))")
    names = {"The runs in numbers", "Cost of a loss", "Settings that differ", "Layers of experts", "Events"}
    assert names <= set(tables)
    assert "reaches the validation loss of dense" in browser("document.querySelector('.card').textContent")


@pytest.mark.parametrize("width", [375, 1280])
def test_names_as_training_gives_them(browser, tmp_path, width):
    # Without RUN_NAME a name lists the settings; one of 250 characters is as long as a folder's may be.
    settings = "moe_true_num_experts_64_topk_8_moe_type_dmoe_gbsz_1024_seq_len_4096_lr_0.0003_PP_1_TP_1_EP_4"
    names = [settings, "long_name_" * 25]
    for path, name in zip(dense_and_moe(tmp_path), names, strict=True):
        path.rename(tmp_path / name)
    write_report([tmp_path / name for name in names], tmp_path / "report.html")
    browser.open(tmp_path / "report.html", width=width, height=800)
    unfold(browser)
    assert browser("document.documentElement.scrollWidth") == width
    shown = "filter(value => value.getBoundingClientRect().width)"
    values = f"[...document.querySelectorAll('.chart .readout b')].{shown}"
    ends = "[value, value.closest('.readout')].map(one => one.getBoundingClientRect().right)"
    boxes = f"{values}.map(value => {ends})"
    assert len(browser(boxes)) > 10 and all(value <= box + 1 for value, box in browser(boxes))
    inside = "getComputedStyle(value.parentElement).overflow"
    assert set(browser(f"{values}.map(value => {inside})")) == {"visible"}  # nothing is cut off before that
    heights = "[...document.querySelectorAll('thead')].map(head => head.getBoundingClientRect().height)"
    assert browser(f"Math.max(...{heights})") < 220
    assert browser.problems == []


def test_dark_and_light_have_their_own_colours(browser, page):
    backs = []
    for dark in (False, True):
        browser.open(page, dark=dark)
        backs.append(browser("getComputedStyle(document.body).backgroundColor"))
    assert backs == ["rgb(255, 255, 255)", "rgb(17, 20, 24)"]


def test_runs_with_hardly_anything(browser, tmp_path):
    one = write_run(tmp_path / "one", [train_record(1, 5.0, experts=experts([3, 1, 2, 2]))])
    nothing = write_run(tmp_path / "nothing", [])
    bad = write_run(tmp_path / "bad", [train_record(index, None) for index in (1, 2)], use_moe=False)
    for runs in ([nothing], [one], [one, nothing, bad]):
        write_report(runs, tmp_path / "report.html")
        browser.open(tmp_path / "report.html")
        assert browser.problems == []
