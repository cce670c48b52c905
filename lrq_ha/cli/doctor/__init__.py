"""`lrq-ha doctor`: is this node, its broker and its group set up as they have to be?"""
