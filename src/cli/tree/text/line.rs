//! One line: pieces of text, each in a style; cut to a width, and painted.

/// Whether there are colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cli::tree) enum Colours {
    On,
    Off,
}

/// A piece of a line.
pub(super) type Span = (Style, String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    Plain,
    Faint,
    Strong,
    Volume,
    Snapshot,
    Busy,
    Bad,
}

/// The text, without its middle where that is needed to fit.
pub(in crate::cli::tree) fn shorten(text: &str, room: usize, cut: &str) -> String {
    let length = count(text);
    if length <= room {
        return text.to_owned();
    }
    let kept = room.saturating_sub(count(cut));
    let (head, tail) = (kept.div_ceil(2), kept / 2);
    let head: String = text.chars().take(head).collect();
    let tail: String = text.chars().skip(length - tail).collect();
    format!("{head}{cut}{tail}")
}

/// The line, without spaces at its end and without what does not fit.
pub(super) fn cut(spans: Vec<Span>, width: Option<usize>, mark: &str) -> Vec<Span> {
    let spans = trimmed(spans);
    let Some(width) = width.filter(|width| length(&spans) > *width) else { return spans };
    let mut room = width.saturating_sub(count(mark));
    let mut kept = Vec::new();
    for (style, text) in spans {
        let piece: String = text.chars().take(room).collect();
        room -= count(&piece);
        kept.push((style, piece));
    }
    kept.push(faint(mark.to_owned()));
    kept
}

fn trimmed(mut spans: Vec<Span>) -> Vec<Span> {
    while let Some((_, text)) = spans.last_mut() {
        text.truncate(text.trim_end().len());
        if !text.is_empty() {
            break;
        }
        spans.pop();
    }
    spans
}

pub(super) fn paint(spans: Vec<Span>, colours: Colours) -> String {
    let coloured = |(style, text): Span| match (style, colours) {
        (Style::Plain, _) | (_, Colours::Off) => text,
        (style, Colours::On) => format!("\x1b[{}m{text}\x1b[0m", code(style)),
    };
    spans.into_iter().filter(|(_, text)| !text.is_empty()).map(coloured).collect()
}

/// What a terminal calls it (ECMA-48, SGR).
fn code(style: Style) -> &'static str {
    match style {
        Style::Plain => "0",
        Style::Faint => "2",
        Style::Strong => "1",
        Style::Volume => "1;32",
        Style::Snapshot => "36",
        Style::Busy => "33",
        Style::Bad => "31",
    }
}

pub(super) fn plain(text: String) -> Span {
    (Style::Plain, text)
}

pub(super) fn faint(text: String) -> Span {
    (Style::Faint, text)
}

pub(super) fn count(text: &str) -> usize {
    text.chars().count()
}

pub(super) fn length(spans: &[Span]) -> usize {
    spans.iter().map(|(_, text)| count(text)).sum()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_text_keeps_both_ends() {
        assert_eq!(shorten("abcdefgh", 8, "…"), "abcdefgh");
        assert_eq!(shorten("abcdefgh", 6, "…"), "abc…gh");
        assert_eq!(shorten("abcdefgh", 1, "…"), "…");
    }

    #[test]
    fn a_line_has_no_spaces_at_its_end_and_no_more_than_fits() {
        let spans = || vec![plain("ab  ".into()), faint("cd".into()), plain("  ".into())];
        let text = |width| paint(cut(spans(), width, "…"), Colours::Off);
        assert_eq!(text(None), "ab  cd");
        assert_eq!(text(Some(8)), "ab  cd");
        assert_eq!(text(Some(6)), "ab  cd");
        assert_eq!(text(Some(5)), "ab  …");
        assert_eq!(text(Some(4)), "ab …");
    }
}
