//! Where layers go in a picture: columns by what they stand on, rows as few as can be.
//!
//! ```text
//! monday --+-- tuesday --+-- disk          the line of a volume has a row of its own
//!          |             +-- copy          below it what branches off, the later the higher,
//!          +-- restored --- its snapshot   so that no edge crosses another
//! ```

use crate::cli::tree::forest::Tree;

/// Where a layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) column: usize,
    pub(super) row: usize,
}

/// A layer, where it is, and where the one is that it stands on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Placed<'a> {
    pub(super) tree: &'a Tree,
    pub(super) at: Spot,
    pub(super) on: Option<Spot>,
}

/// Places of all layers of a pool.
#[derive(Debug)]
pub(super) struct Layout<'a> {
    pub(super) placed: Vec<Placed<'a>>,
    /// The first row of each column that nothing reaches into.
    free: Vec<usize>,
}

impl<'a> Layout<'a> {
    /// Places trees; those that are one layer only fill rows of so many columns.
    pub(super) fn of(roots: &'a [Tree], columns: usize) -> Self {
        let is_alone = |root: &&Tree| root.children().next().is_none();
        let (alone, grown): (Vec<_>, Vec<_>) = roots.iter().partition(is_alone);
        let spot = |(number, tree): (usize, &'a Tree)| {
            let at = Spot { column: number % columns, row: number / columns };
            Placed { tree, at, on: None }
        };
        let placed: Vec<_> = alone.into_iter().enumerate().map(spot).collect();
        let rows = placed.last().map_or(0, |last| last.at.row + 1);
        let deepest = grown.iter().copied().map(depth).max().unwrap_or_default();
        let mut layout = Self { placed, free: vec![rows; columns.max(deepest)] };
        for root in grown {
            layout.line(root, Spot { column: 0, row: 0 }, None);
        }
        layout
    }

    /// How many rows there are.
    pub(super) fn rows(&self) -> usize {
        self.free.iter().copied().max().unwrap_or_default()
    }

    /// Places a layer and all that stands on it, no higher than `least`; its row.
    fn line(&mut self, tree: &'a Tree, least: Spot, on: Option<Spot>) -> usize {
        let line: Vec<_> = std::iter::successors(Some(tree), |tree| ahead(tree)).collect();
        let columns = least.column..least.column + line.len();
        let row = self.free[columns.clone()].iter().copied().fold(least.row, usize::max);
        let mut below = on;
        for (column, tree) in columns.zip(&line) {
            let at = Spot { column, row };
            self.placed.push(Placed { tree, at, on: below });
            self.free[column] = row + 1;
            below = Some(at);
        }
        for (number, tree) in line.iter().enumerate().rev() {
            let at = Spot { column: least.column + number, row };
            self.branches(tree, at);
        }
        row
    }

    fn branches(&mut self, tree: &'a Tree, at: Spot) {
        let mut free = at.row + 1;
        for branch in tree.children().filter(|child| !is_ahead(tree, child)) {
            let least = Spot { column: at.column + 1, row: free };
            free = self.line(branch, least, Some(at)) + 1;
        }
        // The edges to them come down beside this column.
        self.free[at.column] = self.free[at.column].max(free);
    }
}

/// What stands on a layer in the same row: where its line goes on, or the first that branches off.
fn ahead(tree: &Tree) -> Option<&Tree> {
    tree.next.as_deref().or(tree.branches.first())
}

fn is_ahead(tree: &Tree, child: &Tree) -> bool {
    ahead(tree).is_some_and(|ahead| std::ptr::eq(ahead, child))
}

/// How many columns it has.
pub(super) fn depth(tree: &Tree) -> usize {
    1 + tree.children().map(depth).max().unwrap_or_default()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::{
        cli::{client::Things, tree::forest::grow},
        csi::pb::inspect::{Layer, Pool},
    };
    use proptest::prelude::*;

    /// Layers, each of which stands on an earlier one or on nothing.
    fn things(parents: &[Option<prop::sample::Index>]) -> Things {
        let layer = |(number, parent): (usize, &Option<prop::sample::Index>)| Layer {
            layer_id: format!("l{number}"),
            parent_id: match parent {
                Some(index) if number > 0 => format!("l{}", index.index(number)),
                Some(_) | None => String::new(),
            },
            ..Default::default()
        };
        let layers = parents.iter().enumerate().map(layer).collect();
        Things { layers, pools: vec![Pool::default()], ..Default::default() }
    }

    /// Whether two edges meet that do not come from the same layer.
    fn cross(one: &Placed<'_>, other: &Placed<'_>) -> bool {
        let (Some(from), Some(by)) = (one.on, other.on) else { return false };
        from != by && from.column == by.column && from.row <= other.at.row && by.row <= one.at.row
    }

    proptest! {
        #[test]
        fn all_are_placed_none_upon_another_and_no_edge_crosses_another(
            parents: Vec<Option<prop::sample::Index>>
        ) {
            let things = things(&parents);
            let groves = grow(&things);
            let layout = Layout::of(&groves[0].roots, 3);
            prop_assert_eq!(layout.placed.len(), parents.len());
            for (number, one) in layout.placed.iter().enumerate() {
                prop_assert!(one.at.row < layout.rows());
                for other in &layout.placed[..number] {
                    prop_assert_ne!(one.at, other.at);
                    prop_assert!(!cross(one, other), "{:?} {:?}", one, other);
                }
            }
        }
    }
}
